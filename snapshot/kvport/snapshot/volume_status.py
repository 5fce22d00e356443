"""A look at the cache's volume, and what it finds in the words of a status.

In: an open cache, or an error that one could not be opened for. Out: what keeps it from
being used, if anything, and the state that this is.
"""

import contextlib
import threading
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.errors import KvportError
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.root import is_read_only
from kvport.snapshot.errors import (
    CacheAbsentError,
    DiskFullError,
    MissingRootError,
    ReadOnlyError,
    ReplacedRootError,
    StorageError,
)

PATIENCE: Final = 30.0
"""Seconds that a volume gets to answer a look."""


class VolumeState(StrEnum):
    """How it is with the cache."""

    OK = "ok"
    ABSENT = "absent"
    READ_ONLY = "read_only"
    FULL = "full"
    REPLACED = "replaced"
    FAILED = "failed"
    OFF = "off"


@attrs.frozen
class VolumeStatus:
    """How it is with the cache, and since when.

    Attributes:
        state: `full` with a cache that restores, or without one.
        reason: a sentence; empty if all is well.
        since: UTC.
    """

    state: VolumeState
    reason: str
    since: datetime


def check_writable(root: Path) -> None:
    """See that the volume, and who owns the directory, let us write.

    Raises:
        ReadOnlyError: they do not.
        OSError: the volume does not say.
    """
    if is_read_only(root):
        raise ReadOnlyError("the volume, or the cache directory, is read-only")


def state_of(error: KvportError) -> VolumeState:
    """The state of a volume whose cache cannot be used for an error."""
    match error:
        case ReplacedRootError():
            return VolumeState.REPLACED
        case MissingRootError() | CacheAbsentError():
            return VolumeState.ABSENT
        case ReadOnlyError():
            return VolumeState.READ_ONLY
        case DiskFullError():
            return VolumeState.FULL
        case _:
            return VolumeState.FAILED


def look(cache: Cache, root: Path, *, closely: bool) -> KvportError | None:
    """What keeps an open cache from being used; None if nothing does.

    In a thread of its own, since a volume may hang.

    Args:
        cache: on `root`.
        root: its directory.
        closely: whether a byte is written, too.
    """
    found: list[KvportError] = []

    def probe() -> None:
        try:
            with storage_io():
                cache.verify()
                check_writable(root)
                if closely:
                    # A full volume restores; the status says that it is full.
                    with contextlib.suppress(DiskFullError):
                        cache.try_write()
        except KvportError as error:
            found.append(error)

    if cache.stalled:
        return StorageError("the volume does not get on with what it is to write")
    thread = threading.Thread(target=probe, name="kvport-cache-look", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        return StorageError("the volume does not answer")
    return found[0] if found else None
