"""Regular files below the root: made new, or looked at before they are opened.

In: paths, buffers. Out: open files. Whoever can write to the volume can put anything in
a file's place: a link, a FIFO, or another name of a file that is somewhere else, which
is a regular file like ours. So nothing is written but to what was made in that call, or
to a file of ours that has no other name. Unlinking needs no such care: what a name
stands for stays as it is under its others.
"""

import errno
import itertools
import os
import stat
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from kvport.snapshot.cache.blob_stream import UnfitFileError
from kvport.snapshot.cache.directories import opened
from kvport.snapshot.cache.records import Bytes, nbytes

NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
"""How a file is opened that must not be there yet."""
_LOOK: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_IOV: Final = 64
"""Buffers of one call; systems take 1,024 at most."""


def is_own(root: Path, path: Path) -> bool:
    """Whether a path is a file that we may write to: ours, and under no other name.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: the volume does not say.
    """
    return _is_own(path.lstat(), root.stat())


def create(root: Path, path: Path) -> int:
    """A new file's descriptor, for writing; only its owner may open it.

    Args:
        root: taken as it is, links and all.
        path: of the file, below it.

    Raises:
        FileExistsError: the name is taken.
        OSError: it cannot be made.
    """
    with opened(root, path.parent) as parent:
        return os.open(path.name, NEW, 0o600, dir_fd=parent)


def open_own(root: Path, path: Path) -> FileIO:
    """A file of ours that has no other name, as an unbuffered stream, to be changed.

    Args:
        root: taken as it is, links and all.
        path: of the file, below it.

    Raises:
        OSError: it is no such file, or cannot be opened now.
    """
    with opened(root, path.parent) as parent:
        above = root.stat()
        # Looked at before, since to open a device can do things; and after, for races.
        _check_own(os.stat(path.name, dir_fd=parent, follow_symlinks=False), above)
        fd = os.open(path.name, _LOOK | os.O_RDWR, dir_fd=parent)
    try:
        _check_own(os.fstat(fd), above)
        return FileIO(fd, "r+b")
    except BaseException:
        os.close(fd)
        raise


def open_regular(path: Path) -> FileIO:
    """A regular file as an unbuffered stream; never waits for a FIFO's other end.

    Raises:
        FileNotFoundError: there is nothing.
        UnfitFileError: it is a link, a directory, a FIFO, a socket or a device.
        OSError: it cannot be opened now.
    """
    _check_regular(path.lstat())
    fd = os.open(path, _LOOK | os.O_RDONLY)
    try:
        _check_regular(os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def set_trailer(root: Path, path: Path, size: int, trailer: bytes) -> None:
    """Put this behind the first `size` bytes of a file, and nothing else; flush it.

    Raises:
        OSError: it did not reach the medium, or is no file of ours.
    """
    with open_own(root, path) as file:
        file.truncate(size)
        file.seek(size)
        write_all(file.fileno(), [trailer])
        os.fsync(file.fileno())


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


def write_all(fd: int, buffers: Sequence[Bytes]) -> None:
    """Write all of these to an open file.

    Raises:
        OSError: some of it is not written.
    """
    parts = deque(memoryview(part).cast("B") for part in buffers if nbytes(part))
    while parts:
        written = os.writev(fd, list(itertools.islice(parts, _IOV)))
        while parts and written >= len(parts[0]):
            written -= len(parts.popleft())
        if written:
            parts[0] = parts[0][written:]


def _is_own(found: os.stat_result, root: os.stat_result) -> bool:
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_nlink <= 1
        # Some volumes say of all files that they are somebody else's.
        and found.st_uid in {os.geteuid(), root.st_uid}
    )


def _check_own(found: os.stat_result, root: os.stat_result) -> None:
    if not _is_own(found, root):
        raise OSError(errno.EINVAL, "not a file of ours")


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError("not a regular file")
