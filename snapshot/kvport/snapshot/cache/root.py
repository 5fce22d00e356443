"""The cache's root: who owns it, and that it is the one that was meant.

In: a path. Out: a `Claim`, held for as long as this process serves from the root. A
root that should be there is never silently made anew, and a directory that holds other
things is never taken over. A volume may go, or another take its place: `Claim.check`
tells before each change, `Claim.verify` looks closer.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
from pathlib import Path
from typing import Final

from kvport.manifest.canonical import canonical_dumps
from kvport.snapshot.cache.blob_stream import UnfitFileError
from kvport.snapshot.cache.directories import remove_tree
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.regular import NEW, open_regular
from kvport.snapshot.cache.schema import FORMAT
from kvport.snapshot.durable import fsync_directory, fsync_file, write_atomic
from kvport.snapshot.errors import (
    CacheAbsentError,
    CacheInUseError,
    ForeignRootError,
    MissingRootError,
    ReplacedRootError,
    StorageError,
)

_NAME: Final = "root.json"
_ID: Final = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)
_LONGEST: Final = 1 << 16
_PROBE: Final = ".probe"


class Claim:
    """A root with its id, locked for this process until `release`."""

    def __init__(self, path: Path, root_id: str, fd: int, *, fresh: bool) -> None:
        self.path: Final = path
        self.root_id: Final = root_id
        self.fresh: Final = fresh
        self._fd: int | None = fd
        self._lost = ""
        self._place: Final = _place(os.fstat(fd))

    def release(self) -> None:
        """Let another process own the root."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def check(self) -> None:
        """See that the path still leads to the directory that was claimed.

        Once it did not it is lost for good: what failed meanwhile needs a sweep.

        Raises:
            CacheAbsentError: it does not, or the claim was released.
            StorageError: the volume does not say.
        """
        if self._fd is None:
            raise CacheAbsentError("the cache was closed")
        if self._lost:
            raise CacheAbsentError(self._lost)
        try:
            self._locate()
        except MissingRootError as error:
            self._lost = error.message
            raise CacheAbsentError(error.message) from error

    def verify(self) -> None:
        """See that the root is there, and the one that was claimed.

        Raises:
            MissingRootError: it is not there.
            ReplacedRootError: something else is.
            CacheAbsentError: it was not, when last something was to be changed.
            ForeignRootError: its root.json is not one.
            StorageError: the volume does not say.
        """
        identify(self.path, self.root_id)
        self._locate()
        self.check()

    def try_write(self) -> None:
        """Write a byte into the claimed directory as far as the medium, and remove it.

        Raises:
            DiskFullError: the volume is full.
            StorageError: it refused.
        """
        name = f"{_PROBE}.{secrets.token_hex(8)}"
        with storage_io():
            fd = os.open(name, NEW, 0o600, dir_fd=self._fd)
            try:
                os.write(fd, b"x")
                fsync_file(fd)
            finally:
                os.close(fd)
                # To whoever collects what is not the cache's, it is that.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._fd)

    def _locate(self) -> None:
        try:
            with storage_io():
                found = self.path.stat()
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            raise MissingRootError("the cache directory is missing") from error
        if _place(found) != self._place:
            raise ReplacedRootError("another directory stands in the cache's place")


def is_read_only(path: Path) -> bool:
    """Whether nothing can be written there, by the volume's state or for us.

    Raises:
        OSError: the volume does not say.
    """
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) or not os.access(path, os.W_OK)


def is_root(path: Path) -> bool:
    """Whether a cache is at a path, of whatever format."""
    return os.path.lexists(path / _NAME)


def claim(path: Path, expected: str | None) -> Claim:
    """Own a root; make it if there is none, its parent exists and none is expected.

    Args:
        path: the root's directory.
        expected: id that the root must have; None takes any, or a new one.

    Raises:
        MissingRootError: the parent, or the expected root, is not there.
        ReplacedRootError: something else is where the expected root was.
        ForeignRootError: the directory is no cache of this format.
        CacheInUseError: another owner is alive.
        StorageError: the volume refused.
    """
    if expected is not None:
        # Before it is locked: another cache's owner shall not find its own in use.
        identify(path, expected)
    elif not path.is_dir():
        if os.path.lexists(path):
            raise ForeignRootError("a file stands in the cache directory's place")
        if not path.parent.is_dir():
            raise MissingRootError("the cache directory is missing")
        with storage_io():
            path.mkdir(mode=0o700, exist_ok=True)
            fsync_directory(path.parent)
    with storage_io():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        fresh = not os.path.lexists(path / _NAME)
        root_id = identify(path, expected)
    except BaseException:
        os.close(fd)
        raise
    return Claim(path, root_id, fd, fresh=fresh)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CacheInUseError("the cache directory has another owner") from error


def identify(path: Path, expected: str | None) -> str:
    """The id of the root at a path; made if none is expected and the place is empty.

    Raises:
        MissingRootError: the expected root is not there.
        ReplacedRootError: something else is.
        ForeignRootError: the directory is no cache of this format.
        StorageError: the volume refused.
    """
    if expected is not None and not path.is_dir():
        raise MissingRootError("the cache directory is missing")
    try:
        with open_regular(path / _NAME) as file:
            text = file.read(_LONGEST + 1)
        value = json.loads(text) if len(text) <= _LONGEST else None
    except FileNotFoundError:
        value = _found(path, expected)
    except OSError as error:
        raise StorageError("the volume does not give root.json") from error
    except (UnfitFileError, ValueError, RecursionError) as error:
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
        raise ReplacedRootError("another cache stands in the place of this one")
    return root_id


def _found(path: Path, expected: str | None) -> dict[str, object]:
    # Dot files: a half-made root.json of ours, or what desktops leave everywhere.
    empty = all(entry.name.startswith(".") for entry in path.iterdir())
    if expected is not None:
        if empty:
            raise MissingRootError("the cache directory is empty, as if not mounted")
        raise ReplacedRootError("the cache directory has no root.json any more")
    if not empty:
        raise ForeignRootError("the directory is not empty and not a cache")
    value: dict[str, object] = {"id": secrets.token_hex(16), "format": FORMAT}
    with storage_io():
        path.chmod(0o700)
        for left in path.glob(f".{_NAME}.*"):
            remove_tree(left)
        write_atomic(path / _NAME, canonical_dumps(value), 0o600)
    return value


def _place(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
