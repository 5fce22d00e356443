"""The files below the root: blobs written once, directories, staging.

In: bytes. Out: allocated sizes, bytes. Nothing here knows of rows: who calls decides
what is to be written, and makes it durable before it becomes visible.

Files are flushed as far as the drive, one by one; the flush of their directories then
empties the drive's own cache, once for all of them (see `kvport.snapshot.durable`).
"""

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.snapshot.cache.records import Bytes, nbytes
from kvport.snapshot.durable import fsync_directory
from kvport.snapshot.errors import DiskFullError, StorageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_SECTOR: Final = 512
"""Unit of `st_blocks`, whatever the file system's block."""
_IOV: Final = 64
"""Buffers of one call; systems take 1,024 at most."""


class UnfitFileError(Exception):
    """What stands in a file's place is no such file, or does not give its bytes."""


@attrs.frozen
class WrittenFile:
    """A blob under a temporary name, flushed, not yet renamed."""

    temporary: Path
    final: Path
    alloc: int


class Files:
    """Paths below one root, and what is done with them."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self.namespaces: Final = root / "ns"
        self.staging: Final = root / "staging"

    def namespace(self, namespace_id: str) -> Path:
        """Directory of a namespace's blobs."""
        return self.namespaces / namespace_id

    def blob(self, namespace_id: str, digest: BlobDigest) -> Path:
        """Where a blob lives."""
        return self.namespaces / namespace_id / digest.hex()

    def make_directory(self, path: Path) -> None:
        """Make a directory of mode 0700, durably, unless it is there.

        Anything else that has its name goes, a link to a directory too.
        """
        with storage_io():
            if not is_directory(path):
                remove_tree(path)
                path.mkdir(mode=0o700)
                fsync_directory(path.parent)

    def write(
        self, namespace_id: str, digest: BlobDigest, buffers: Sequence[Bytes]
    ) -> WrittenFile:
        """Write and flush a blob under a temporary name.

        Raises:
            OSError: nothing is left of it.
        """
        final = self.blob(namespace_id, digest)
        temporary = final.with_name(f"{final.name}.{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        try:
            _write_all(fd, buffers)
            os.fsync(fd)
            alloc = os.fstat(fd).st_blocks * _SECTOR
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)
        return WrittenFile(temporary, final, alloc)

    def read(self, namespace_id: str, digest: BlobDigest, size: int) -> bytearray:
        """The whole blob.

        Raises:
            FileNotFoundError: it has no file.
            UnfitFileError: it is no file of this size, or the medium lost its bytes.
            OSError: it cannot be read now.
        """
        with self.open(namespace_id, digest, size) as file:
            data = bytearray(size)
            view = memoryview(data)
            done = 0
            while done < size:
                try:
                    count = file.readinto(view[done:])
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    raise UnfitFileError("a blob cannot be read") from error
                if not count:
                    raise UnfitFileError("a blob ended early")
                done += count
            return data

    def open(self, namespace_id: str, digest: BlobDigest, size: int) -> FileIO:
        """The blob as an unbuffered stream.

        Raises:
            FileNotFoundError: it has no file.
            UnfitFileError: it is no file of this size.
            OSError: it cannot be opened now.
        """
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(open_regular(self.blob(namespace_id, digest)))
            if os.fstat(file.fileno()).st_size != size:
                raise UnfitFileError("a blob has another size than its row")
            undo.pop_all()
        return file

    def overhead_bytes(self) -> int:
        """Allocated bytes of directories and of the root's own files, measured.

        Not of the index, which measures itself.
        """
        found = [path.stat().st_blocks for path in (self.root,) if path.is_dir()]
        found += [
            entry.stat(follow_symlinks=False).st_blocks
            for entry in _entries(self.root)
            if not entry.name.startswith("index.sqlite")
        ]
        found += [
            entry.stat(follow_symlinks=False).st_blocks
            for parent in (self.namespaces, self.staging)
            for entry in _entries(parent)
            if entry.is_dir(follow_symlinks=False)
        ]
        return sum(found) * _SECTOR


def open_regular(path: Path) -> FileIO:
    """A regular file as an unbuffered stream; never waits for a FIFO's other end.

    Raises:
        FileNotFoundError: there is nothing.
        UnfitFileError: it is a link, a directory, a FIFO, a socket or a device.
        OSError: it cannot be opened now.
    """
    # Looked at before, since to open a device can do things; and after, for races.
    _check_regular(path.lstat())
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags)
    try:
        _check_regular(os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def flush(path: Path) -> None:
    """Flush a file that someone else has written.

    Raises:
        OSError: it did not reach the medium, or is no file.
    """
    try:
        with open_regular(path) as file:
            os.fsync(file.fileno())
    except UnfitFileError as error:
        raise OSError(errno.EINVAL, "not a regular file") from error


def publish(temporary: Path, final: Path) -> None:
    """Give a file its name; whatever had it goes, a directory too.

    Raises:
        OSError: the file is where it was.
    """
    try:
        temporary.rename(final)
    except IsADirectoryError:
        remove_tree(final)
        temporary.rename(final)


def sync_directories(directories: Iterable[Path]) -> None:
    """Flush directories in which names were made."""
    for directory in set(directories):
        fsync_directory(directory)


def remove_tree(path: Path) -> None:
    """Remove a directory or file with all below it, never what a link points to."""
    if is_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_directory(path: Path) -> bool:
    """Whether a directory is there; a link to one is none."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def allocated(path: Path) -> int:
    """Allocated bytes of one file."""
    return path.lstat().st_blocks * _SECTOR


def tree_allocated(path: Path) -> int:
    """Allocated bytes of a file, or of a directory with all below it."""
    total = allocated(path)
    if not is_directory(path):
        return total
    for parent, directories, files in os.walk(path):
        for name in (*directories, *files):
            with contextlib.suppress(FileNotFoundError):
                total += allocated(Path(parent, name))
    return total


def is_full(error: OSError) -> bool:
    """Whether the volume, or our share of it, has no space left."""
    return error.errno in _FULL


@contextlib.contextmanager
def storage_io() -> Iterator[None]:
    """Say the file system's errors in our words.

    Raises:
        DiskFullError: no space is left.
        StorageError: anything else.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFullError("the volume is full") from error
        raise StorageError("the volume refused a change") from error


def _write_all(fd: int, buffers: Sequence[Bytes]) -> None:
    parts = deque(memoryview(part).cast("B") for part in buffers if nbytes(part))
    while parts:
        written = os.writev(fd, list(itertools.islice(parts, _IOV)))
        while parts and written >= len(parts[0]):
            written -= len(parts.popleft())
        if written:
            parts[0] = parts[0][written:]


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError("not a regular file")


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
