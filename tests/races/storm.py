"""A storm: clients, commands and a sampler on one server, until the time is over."""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import attrs

from kvport.api.client import Client
from tests.races.clients import Storming
from tests.races.world import GUEST, World

CLIENTS = 16
_SAMPLE_SECONDS = 0.05
_COMMAND_SECONDS = 2.0

_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("cache", "stats"),
    ("cache", "plan", "--cap", "4MiB"),
    ("cache", "clear", "--namespace", "llama", "--older-than", "2s", "--yes"),
    ("cache", "namespace", "set", "qwen3_5", "--ttl", "30m"),
    ("cache", "gc", "--yes"),
    ("cache", "namespace", "list"),
    ("cache", "pins"),
    ("cache", "clear", "--namespace", GUEST, "--yes"),
    ("cache", "scrub", "--status"),
    ("models", "list"),
)
_COMMAND_CODES = {"unknown_namespace"}


@attrs.define
class Weather:
    """What was seen in a storm.

    Attributes:
        failures: by whom, and how; the first one ends the storm.
        samples: bytes that were below the root at one moment, at least.
        commands: that were run, and succeeded or were refused as they may be.
    """

    failures: list[str] = attrs.field(factory=list)
    samples: list[int] = attrs.field(factory=list)
    commands: int = 0


def storm(world: World, *, seed: int, seconds: float) -> Weather:
    """Let all clients do as they like; ends early if one fails."""
    weather, over = Weather(), threading.Event()

    def guarded(name: str, work, *last) -> None:
        try:
            while not over.is_set():
                work()
        except Exception:  # noqa: BLE001 - told to whoever waits
            doing = f" ({last[0].last})" if last else ""
            weather.failures.append(f"{name}{doing}:\n{traceback.format_exc()}")
            over.set()

    clients = [Storming(world, number, seed) for number in range(CLIENTS)]
    rng = random.Random(f"{seed}/commands")
    command = functools.partial(_command, world, rng, weather, over)
    sample = functools.partial(_sample, world, weather)
    threads = [
        threading.Thread(target=guarded, args=(f"client {one.number}", one.step, one))
        for one in clients
    ]
    threads += [
        threading.Thread(target=guarded, args=("commands", command)),
        threading.Thread(target=guarded, args=("sampler", sample)),
    ]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    for one in clients:
        one.client.close()
    return weather


def _command(
    world: World, rng: random.Random, weather: Weather, over: threading.Event
) -> None:
    arguments = rng.choice(_COMMANDS)
    done = subprocess.run(
        [sys.executable, "-m", "kvport.api", *arguments, "--json"],
        env={**os.environ, "KVPORT_HOME": str(world.home)},
        capture_output=True,
        timeout=100,
        check=False,
    )
    answer = json.loads(done.stdout or b"{}")
    refused = done.returncode == 1 and answer.get("code") in _COMMAND_CODES
    assert refused or done.returncode == 0, (arguments, done.stdout, done.stderr)
    assert not done.stderr, (arguments, done.stderr)
    weather.commands += 1
    over.wait(_COMMAND_SECONDS)


def _sample(world: World, weather: Weather) -> None:
    root = world.home / "cache"
    before, after = _files(root), _files(root)
    # What was there before and after was there at the moment between, all of it.
    held = sum(min(size, after.get(path, 0)) for path, size in before.items())
    weather.samples.append(held)
    time.sleep(_SAMPLE_SECONDS)


def _files(root: Path) -> dict[Path, int]:
    """Allocated bytes by path of all that is found."""
    found: dict[Path, int] = {}
    for parent, directories, files in os.walk(root, onerror=lambda _: None):
        for name in (*directories, *files):
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.lstat().st_blocks * 512
    return found


def quiet(client: Client, *, seconds: float = 60) -> dict:
    """Numbers of a server that has nothing left to do."""
    end = time.monotonic() + seconds
    before = None
    while True:
        found = client.stats()
        cache = found["cache"]
        idle = not cache["leases"] and not cache["account"]["held"]
        if idle and found["total_bytes"] == before:
            return found
        assert time.monotonic() < end, found
        before = found["total_bytes"]
        time.sleep(1)
