"""Artifacts on the client's side: written whole or not at all, and read in pieces."""

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvport.snapshot.durable import fsync_directory, fsync_file

PIECE: Final = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes so far, and in total; 0 if that is unknown."""


@contextlib.contextmanager
def open_destination(to: Path | BinaryIO) -> Iterator[BinaryIO]:
    """Where a download goes; a file appears under its name when the block ends well.

    Links are followed. A pipe or a device is written to, and stays what it is.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(to, io.RawIOBase):  # standard output of an unbuffered Python
        whole = io.BufferedWriter(to)  # a raw write may take less than it is given
        try:
            yield whole
        finally:
            whole.detach()  # flushes, and leaves the stream open
        return
    if not isinstance(to, Path):
        yield to
        return
    if to.exists() and not to.is_file():
        with to.open("wb") as file:
            yield file
        return
    to = Path(os.path.realpath(to))
    temporary = to.with_name(f".{to.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # State can be read back into text: it is nobody else's.
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            yield file
            file.flush()
            fsync_file(file.fileno())
        temporary.replace(to)
        fsync_directory(to.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def upload(
    source: Path | BinaryIO, progress: Progress | None
) -> Iterator[tuple[dict[str, str], Iterator[bytes]]]:
    """Headers and content of an upload.

    Raises:
        OSError: the source cannot be read.
    """
    if not isinstance(source, Path):
        yield {}, _pieces(source, 0, progress)
        return
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield {"content-length": str(size)}, _pieces(file, size, progress)


def _pieces(file: BinaryIO, size: int, progress: Progress | None) -> Iterator[bytes]:
    done = 0
    while piece := file.read(PIECE):
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, size)
