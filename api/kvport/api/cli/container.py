"""How long a `.kvport` file is, and how long it says that it is."""

import contextlib
import io
import os
import stat
from typing import BinaryIO, Final

from kvport.manifest.model import Manifest
from kvport.manifest.parts import Point, Segment
from kvport.manifest.sealed import SealedManifest
from kvport.manifest.ustar import BLOCK, Entry, container_size

_SIZE: Final = slice(124, 135)
"""Digits of an entry's size in its header."""
_PIECE: Final = 1 << 20


class Counted(io.BufferedIOBase):
    """A stream that is read once, with its first block and the length kept.

    Attributes:
        head: the header of the container's first entry, the envelope.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.head = b""
        self._stream = stream
        self._read = 0

    def read(self, size: int | None = -1) -> bytes:
        """As of any stream."""
        data = self._stream.read(-1 if size is None else size)
        self._read += len(data)
        if len(self.head) < BLOCK:
            self.head += data[: BLOCK - len(self.head)]
        return data

    def size(self) -> int:
        """Bytes of the whole stream; of a pipe, all that is left is read."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._stream.fileno())
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        while self.read(_PIECE):
            pass
        return self._read


def declared_size(manifest: Manifest | SealedManifest, head: bytes) -> int:
    """Bytes of the container that a manifest describes.

    Args:
        manifest: of the container.
        head: header of its envelope, which passed the container's reader.
    """
    if isinstance(manifest, SealedManifest):
        messages = (manifest.private, manifest.tokens, *manifest.blobs)
        sizes = [message.size for message in messages]
    else:
        parts: tuple[Segment | Point, ...] = (*manifest.segments, *manifest.points)
        blobs = {b.digest: b.encoded_size for part in parts for b in part.blobs}
        sizes = [manifest.prefix.size, *blobs.values()]
    return container_size(Entry("", size) for size in (int(head[_SIZE], 8), *sizes))
