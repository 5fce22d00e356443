"""Durable writes: what these functions have returned from survives a power cut.

On macOS `fsync` leaves data in the drive's cache; `F_FULLFSYNC` flushes it. File
systems that do not know the call (network volumes, some external ones) get `fsync`.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FULL_FSYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
_NOT_OFFERED: Final = frozenset({errno.ENOTSUP, errno.ENOTTY, errno.EINVAL})


def fsync_file(fd: int) -> None:
    """Flush an open file or directory to the medium.

    Raises:
        OSError: the write did not reach the medium; what it held is undefined.
    """
    if _FULL_FSYNC is not None:
        try:
            fcntl.fcntl(fd, _FULL_FSYNC)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        else:
            return
    os.fsync(fd)


def fsync_directory(path: Path) -> None:
    """Flush a directory's entries: names made, replaced or removed in it.

    Raises:
        OSError: no such directory, or the medium failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync_file(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, mode: int) -> None:
    """Put `data` at `path`, durably: a reader sees the old file or the new, whole.

    Args:
        path: may exist; its directory must.
        data: the whole content.
        mode: permission bits, set exactly, whatever the umask.

    Raises:
        OSError: nothing changed at `path`, unless it was the directory's flush that
            failed.
    """
    with _temporary(path, data, mode) as temporary:
        temporary.replace(path)
    fsync_directory(path.parent)


def write_once(path: Path, data: bytes, mode: int) -> None:
    """Put `data` at `path`, durably and whole, if there is nothing yet.

    Args:
        path: must not exist; its directory must.
        data: the whole content.
        mode: permission bits, set exactly, whatever the umask.

    Raises:
        FileExistsError: the name is taken.
        OSError: as of `write_atomic`.
    """
    with _temporary(path, data, mode) as temporary:
        os.link(temporary, path)
    fsync_directory(path.parent)


@contextlib.contextmanager
def _temporary(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A flushed file beside `path`, gone afterwards if it still has its own name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            fsync_file(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
