"""What the clients of a storm share: files, artifacts, answers, counts."""

import collections
import io
import random
import threading
from pathlib import Path

import attrs

from kvport.api.results import Completion
from tests.races.talks import Talk, Talks

GUEST = "guest"
"""The model that comes and goes."""


@attrs.frozen
class Answered:
    """A prompt and its greedy answer."""

    talk: Talk
    answer: Completion
    exact: bool


@attrs.frozen
class File:
    """An artifact in a file; `talk` is what it was made of."""

    path: Path
    talk: Talk


@attrs.define
class World:
    """What all clients of a storm share.

    Attributes:
        home: the server's.
        files: a directory for artifacts.
        guest: directory of the model that comes and goes.
        talks: conversations.
        foreign: artifacts of another home, which the server trusts.
    """

    home: Path
    files: Path
    guest: Path
    talks: Talks
    foreign: tuple[File, ...] = ()
    answered: list[Answered] = attrs.field(factory=list)
    counts: collections.Counter[str] = attrs.field(factory=collections.Counter)
    _exported: dict[Path, Talk] = attrs.field(factory=dict)
    _admitted: dict[str, Talk] = attrs.field(factory=dict)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def count(self, name: str, outcome: str) -> None:
        with self._lock:
            self.counts[f"{name}: {outcome}"] += 1

    def exported(self, path: Path, talk: Talk) -> None:
        with self._lock:
            self._exported[path] = talk

    def admitted(self, ident: str, talk: Talk) -> None:
        with self._lock:
            self._admitted[ident] = talk

    def a_file(self, rng: random.Random) -> File | None:
        with self._lock:
            ours = [File(path, talk) for path, talk in self._exported.items()]
        found = [*ours, *self.foreign]
        return rng.choice(found) if found else None

    def an_artifact(self, rng: random.Random) -> tuple[str, Talk] | None:
        with self._lock:
            found = list(self._admitted.items())
        return rng.choice(found) if found else None


class TornError(Exception):
    """This client breaks a transfer off."""


class Torn(io.BytesIO):
    """Takes, or gives, so many bytes, and no more."""

    def __init__(self, data: bytes = b"", *, after: int) -> None:
        super().__init__(data)
        self._left = after

    def write(self, data) -> int:
        self._use(len(data))
        return super().write(data)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(min(4096, size or 4096))
        self._use(len(data))
        return data

    def _use(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TornError
