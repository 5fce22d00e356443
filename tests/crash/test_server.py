"""A real server whose cache's volume fails while it answers, and then works again."""

import errno
import io
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from kvport.api.client import Client
from kvport.api.problems import ProblemError
from kvport.manifest.trust import TrustEntry
from kvport.snapshot.keyring import Keyring
from tests.api.conftest import running
from tests.crash.shim import linux_only, orders
from tests.server_process import running_server

pytestmark = linux_only

REFUSALS = {"storage", "disk_full", "capacity", "cache_absent"}
STATUSES = {500, 503, 507}


def prompt(number: int) -> list[int]:
    return [1 + (number * 7919 + i * i * 31 + i) % 250 for i in range(700)]


@attrs.frozen
class Volume:
    """The volume of a server's cache; `fails` from now on, until it `works`."""

    control: Path
    client: Client

    def fails(self, error: int) -> None:
        self._say(orders(fail=1, sticky=1, errno=error))

    def slow(self) -> None:
        self._say(orders(delay=2000))

    def works(self) -> None:
        self._say("")
        deadline = time.monotonic() + 60
        # Full is what it stays until something is stored again.
        while self.client.health().cache not in {"ok", "full"}:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def answers(self, number: int, *, cached: int = 0) -> tuple[int, ...]:
        """Tokens of a reply, of whose prompt so much at least was restored."""
        done = self.client.complete(
            "llama", tokens=prompt(number), max_tokens=4, temperature=0, ignore_eos=True
        )
        assert done.cached_tokens >= cached
        return tuple(done.tokens)

    def _say(self, text: str) -> None:
        # In one step: the server reads it before every call.
        fresh = self.control.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self.control)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, model_dir) -> Iterator:
    with running(tmp_path_factory.mktemp("elsewhere"), model_dir("llama")) as server:
        yield server


@pytest.fixture
def volume(tmp_path, library, monkeypatch, model_dir, elsewhere) -> Iterator[Volume]:
    home, cache = tmp_path / "home", tmp_path.resolve() / "cache"
    home.mkdir(mode=0o700)
    public = elsewhere.node.keyring.signing_key().public
    Keyring(home).add(TrustEntry(public_key=public, name="elsewhere"))
    control = tmp_path / "control"
    control.write_text("")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CRASH_SHIM", orders(root=cache, control=control))
    options = ("--cache-dir", str(cache), "--cap", "64MiB")
    with (
        running_server(home, model_dir("llama"), options=options),
        Client.for_home(home) as client,
    ):
        monkeypatch.undo()
        yield Volume(control, client)


def exported(elsewhere, number: int) -> bytes:
    tokens, file = prompt(number), io.BytesIO()
    elsewhere.client.complete("llama", tokens=tokens, max_tokens=1, ignore_eos=True)
    elsewhere.client.export("llama", file, tokens=tokens)
    return file.getvalue()


def test_a_server_answers_while_its_volume_fails_and_goes_on(volume, elsewhere):
    expected = volume.answers(0)
    for number, error in enumerate((errno.ENOSPC, errno.EIO, errno.EROFS)):
        artifact = exported(elsewhere, 20 + number)
        volume.fails(error)
        volume.answers(10 + number)
        assert volume.answers(0) == expected
        with pytest.raises(ProblemError) as refusal:
            volume.client.import_(io.BytesIO(artifact))
        assert refusal.value.problem.code in REFUSALS
        assert refusal.value.problem.status in STATUSES
        volume.works()
        volume.answers(10 + number)
        volume.answers(10 + number, cached=512)
        volume.client.import_(io.BytesIO(artifact))
        volume.answers(20 + number, cached=512)
    volume.slow()
    volume.answers(30)
    volume.answers(30, cached=512)
