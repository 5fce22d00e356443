"""The cache's root: who owns it, and that it is the one that was meant.

In: a path. Out: a `Claim`, held for as long as this process serves from the root. A
root that should be there is never silently made anew, and a directory that holds other
things is never taken over.
"""

import fcntl
import json
import os
import re
import secrets
from pathlib import Path
from typing import Final

from kvport.manifest.canonical import canonical_dumps
from kvport.snapshot.cache.files import UnfitFileError, open_regular, storage_io
from kvport.snapshot.cache.schema import FORMAT
from kvport.snapshot.durable import fsync_directory, write_atomic
from kvport.snapshot.errors import (
    CacheInUseError,
    ForeignRootError,
    MissingRootError,
)

_NAME: Final = "root.json"
_ID: Final = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)
_LONGEST: Final = 1 << 16


class Claim:
    """A root with its id, locked for this process until `release`."""

    def __init__(self, path: Path, root_id: str, fd: int, *, fresh: bool) -> None:
        self.path: Final = path
        self.root_id: Final = root_id
        self.fresh: Final = fresh
        self._fd: int | None = fd

    def release(self) -> None:
        """Let another process own the root."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def claim(path: Path, expected: str | None) -> Claim:
    """Own a root; make it if there is none, its parent exists and none is expected.

    Args:
        path: the root's directory.
        expected: id that the root must have; None takes any, or a new one.

    Raises:
        MissingRootError: the parent, or the expected root, is not there.
        ForeignRootError: the directory is no cache of this format.
        CacheInUseError: another owner is alive.
        StorageError: the volume refused.
    """
    if not path.is_dir():
        if expected is not None or not path.parent.is_dir():
            raise MissingRootError("the cache directory is missing")
        with storage_io():
            path.mkdir(mode=0o700, exist_ok=True)
            fsync_directory(path.parent)
    with storage_io():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        fresh = not os.path.lexists(path / _NAME)
        root_id = _identify(path, expected)
    except BaseException:
        os.close(fd)
        raise
    return Claim(path, root_id, fd, fresh=fresh)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CacheInUseError("the cache directory has another owner") from error


def _identify(path: Path, expected: str | None) -> str:
    try:
        with open_regular(path / _NAME) as file:
            text = file.read(_LONGEST + 1)
        value = json.loads(text) if len(text) <= _LONGEST else None
    except FileNotFoundError:
        value = _found(path, expected)
    except (OSError, UnfitFileError, ValueError, RecursionError) as error:
        raise ForeignRootError("root.json cannot be read") from error
    if not isinstance(value, dict):
        raise ForeignRootError("root.json is not ours")
    # By type too: JSON's true equals 1.
    if (type(value.get("format")), value.get("format")) != (int, FORMAT):
        raise ForeignRootError("the cache directory is of another format")
    root_id = value.get("id")
    if not isinstance(root_id, str) or not _ID.fullmatch(root_id):
        raise ForeignRootError("root.json has no id")
    if expected is not None and root_id != expected:
        raise MissingRootError("another cache stands in the place of this one")
    return root_id


def _found(path: Path, expected: str | None) -> dict[str, object]:
    if expected is not None:
        raise MissingRootError("the cache directory has lost its root.json")
    # Dot files: a half-made root.json of ours, or what desktops leave everywhere.
    if any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise ForeignRootError("the directory is not empty and not a cache")
    value: dict[str, object] = {"id": secrets.token_hex(16), "format": FORMAT}
    with storage_io():
        path.chmod(0o700)
        write_atomic(path / _NAME, canonical_dumps(value), 0o600)
    return value
