"""How a blob may be encoded in the container; nothing of it is taken from the file.

`shuffle-zstd`: the blob's bytes are shuffled, and the result is one zstd frame
(RFC 8878).

* Pieces: the blob's header, then each tensor, each cut into pieces of 1 MiB from its
  own first byte on. They follow from the signed layout.
* Shuffle: in a piece of a tensor whose dtype has w bytes, the first bytes of all values
  come first, then all second bytes, and so on. Sign and exponent of floats, which vary
  little, so come to stand together.
* Frame: its header is the one derived from the blob's size: with that size, without
  checksum or dictionary, and with a window of at most 1 MiB.

An encoded blob is smaller than the plain one, and at least its 128th part: what a short
file makes a reader decode is bounded.

Digests, and whatever is named by them, are those of the plain blob. The encoded bytes
have no digest of their own, but an exact size, smaller than that of the plain blob.
"""

import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import attrs

from kvport.manifest.blob_layout import DTYPE_BYTES, BlobLayout
from kvport.manifest.limits import MIB

PIECE_BYTES: Final = MIB
WINDOW_LOG: Final = 20
"""A decoder needs 2 to this power bytes of what it wrote before."""

RATIO: Final = 128
"""How many times larger than its encoded bytes a blob may be."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SINGLE_SEGMENT: Final = 0x20
_WINDOW: Final = bytes([(WINDOW_LOG - 10) << 3])


class Codec(StrEnum):
    """How the bytes of a blob stand in the container."""

    NONE = "none"
    SHUFFLE_ZSTD = "shuffle-zstd"


@attrs.frozen
class Piece:
    """Consecutive bytes of a blob, of values of `width` bytes; 1 is not shuffled."""

    size: int
    width: int


def is_encoded_size(encoded: int, size: int) -> bool:
    """Whether a blob of `size` bytes may be encoded in so many."""
    return 0 < encoded < size <= encoded * RATIO


def pieces(layout: BlobLayout) -> Iterator[Piece]:
    """The pieces of a blob, in order."""
    parts = [(len(layout.header), 1)]
    parts += ((t.nbytes, DTYPE_BYTES[t.dtype]) for t in layout.tensors)
    for size, width in parts:
        for start in range(0, size, PIECE_BYTES):
            yield Piece(min(PIECE_BYTES, size - start), width)


def shuffle(data: bytes | bytearray, width: int) -> bytes | bytearray:
    """A piece with equal bytes of its values side by side."""
    if width == 1:
        return data
    return b"".join(data[byte::width] for byte in range(width))


def unshuffle(data: bytes | bytearray, width: int) -> bytes | bytearray:
    """Inverse of `shuffle`."""
    if width == 1:
        return data
    values, plain = len(data) // width, bytearray(len(data))
    for byte in range(width):
        plain[byte::width] = data[byte * values : (byte + 1) * values]
    return plain


def frame_header(size: int) -> bytes:
    """The first bytes of the frame of a blob of `size` bytes, at most 1 GiB."""
    single = size <= 1 << WINDOW_LOG
    head = bytes([_SINGLE_SEGMENT]) if single else b"\0" + _WINDOW
    if size < 256:
        code, field = 0, struct.pack("<B", size)
    elif size < 65_536 + 256:
        code, field = 1, struct.pack("<H", size - 256)
    else:
        code, field = 2, struct.pack("<I", size)
    return _MAGIC + bytes([head[0] | code << 6]) + head[1:] + field
