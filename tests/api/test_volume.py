"""A server whose cache goes away, comes back, or is not there when it starts."""

import io
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvport.api.client import Client
from kvport.api.problems import ProblemError
from tests.server_process import running_server

TEXT = "Say something long about volumes. " * 20


def state(client: Client) -> str:
    return client.health().cache


def until(client: Client, wanted: str) -> None:
    end = time.monotonic() + 30
    while state(client) != wanted:
        assert time.monotonic() < end
        time.sleep(0.05)


def unpinned(client: Client) -> str | None:
    """Why nothing is pinned of what is computed now; None if all of it is."""
    pin = {"owner": "night", "seconds": 60}
    done = client.complete("llama", prompt=TEXT + "!", max_tokens=3, pin=pin)
    return done.pinned.unpinned_reason


def cached(client: Client) -> int:
    done = client.complete("llama", prompt=TEXT, max_tokens=3, ignore_eos=True)
    return done.cached_tokens


def shown(home: Path) -> str:
    """What `kvport cache stats` says."""
    command = [sys.executable, "-m", "kvport.api", "cache", "stats"]
    return subprocess.check_output([*command, "--home", home], text=True)


def test_b26_a_server_outlives_its_cache_and_starts_without_it(tmp_path, model_dir):
    model, home = model_dir("llama"), tmp_path / "home"
    volume, away = tmp_path / "volume", tmp_path / "away"
    volume.mkdir()
    options = ("--cache-dir", str(volume / "cache"))
    with running_server(home, model, options=options), Client.for_home(home) as client:
        assert state(client) == "ok"
        assert cached(client) == 0
        length = cached(client)
        assert length > 100
        volume.rename(away)
        until(client, "absent")
        assert cached(client) == 0
        assert unpinned(client) == "absent"
        assert [one.state for one in client.models()] == ["absent"]
        with pytest.raises(ProblemError) as refused:
            client.export("llama", io.BytesIO(), prompt=TEXT)
        assert (refused.value.code, refused.value.status) == ("cache_absent", 503)
        with pytest.raises(ProblemError) as refused:
            client.import_(io.BytesIO(b"anything"))
        assert (refused.value.code, refused.value.status) == ("cache_absent", 503)
        assert "absent since" in shown(home)
        assert client.stats()["cache"] is None
        assert not volume.exists()
        away.rename(volume)
        until(client, "ok")
        assert cached(client) == length
        assert unpinned(client) is None
        assert "absent since" not in shown(home)
        answer = httpx.get(f"{client.url}/healthz", trust_env=False)
        assert (answer.status_code, answer.json()["cache"]) == (200, "ok")
    volume.rename(away)
    with running_server(home, model, options=options), Client.for_home(home) as client:
        assert state(client) == "absent"
        assert cached(client) == 0
        away.rename(volume)
        until(client, "ok")
        assert cached(client) == length
    log = (home / "server.log").read_text()
    assert log.count("cache_lost") == 2
    assert log.count("cache_is_back") == 2
