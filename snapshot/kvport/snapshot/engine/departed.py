"""Models that were loaded once, and are not any more.

In: models as they leave. Out: for a request that names one, a refusal that says what
became of it; nobody is left to think that the name was wrong.
"""

import shlex
import threading
import time
from datetime import UTC, datetime
from typing import Final

import attrs

from kvport.manifest.errors import KvportError
from kvport.manifest.timestamps import format_time
from kvport.snapshot.engine.models import Model
from kvport.snapshot.errors import ModelUnloadedError, UnknownModelError

_REMEMBERED: Final = 100
"""Names; whoever loads under ever new ones is told of the last."""


@attrs.frozen
class Departure:
    """One model that has left.

    Attributes:
        name: what it was called.
        source: its directory.
        at: when it left, in seconds of the epoch.
        idle: seconds without a request after which it left by itself; None if someone
            unloaded it.
    """

    name: str
    source: str
    at: int
    idle: float | None


class Departed:
    """By name, for as long as the process lives; thread-safe."""

    def __init__(self) -> None:
        """None has left yet."""
        self._lock: Final = threading.Lock()
        self._found: dict[str, Departure] = {}

    def add(self, model: Model, keep_alive: float, *, idle: bool) -> None:
        """A model leaves, by itself if it was idle for so many seconds."""
        after = keep_alive if idle else None
        one = Departure(model.name, str(model.directory), int(time.time()), after)
        with self._lock:
            found = {name: was for name, was in self._found.items() if name != one.name}
            last = [*found.values(), one][-_REMEMBERED:]
            self._found = {was.name: was for was in last}

    def all(self) -> tuple[Departure, ...]:
        """The last of each name, whether or not it was loaded again since."""
        return tuple(self._found.values())

    def refusal(self, name: str) -> KvportError:
        """Why a model of this name cannot be used, which is not loaded now."""
        if (one := self._found.get(name)) is None:
            return UnknownModelError(f"no model is called {name!r} here")
        at = format_time(datetime.fromtimestamp(one.at, UTC))
        idle = "" if one.idle is None else f", after {one.idle:g} s without a request"
        load = shlex.join(["kvport", "models", "load", one.source, "--name", name])
        return ModelUnloadedError(
            f"{name!r} was unloaded at {at}{idle}; `{load}` loads it again"
        )
