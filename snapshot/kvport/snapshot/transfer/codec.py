"""Encoding and decoding of blobs, piece by piece; manifest/codec.py says what it means.

In: bytes in chunks of any length. Out: bytes in pieces. A blob of any size takes a few
MiB: one piece, the decoder's window, and one block of the frame.

The encoded bytes are nobody's word: only their number is signed. So a frame is taken
apart here into its blocks, of which each is decoded by itself: a block has at most
128 KiB, which bounds what a byte of input can become, and the frame's last byte is
known before anything that follows it is looked at.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Final, TypeAlias

import zstandard

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.codec import (
    WINDOW_LOG,
    frame_header,
    pieces,
    shuffle,
    unshuffle,
)
from kvport.manifest.errors import EncodedBlobError

ENCODER: Final = "zstd " + ".".join(map(str, zstandard.ZSTD_VERSION))
"""What encodes here: another version may encode the same blob otherwise."""

_LEVEL: Final = 1
_BLOCK_BYTES: Final = 1 << 17
_BLOCK_HEADER_BYTES: Final = 3
_RLE: Final = 1
_RESERVED: Final = 3

_Shuffle: TypeAlias = Callable[[bytes | bytearray, int], bytes | bytearray]


class Encoder:
    """Encodes one blob: the same bytes for the same blob, under one `ENCODER`."""

    def __init__(self, layout: BlobLayout) -> None:
        # Cut as pieces are, so that the library sees the same calls each time.
        self._pieces = _Pieces(layout, shuffle)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL,
            window_log=WINDOW_LOG,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
            threads=0,
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._frame = compressor.compressobj(size=layout.size)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the blob's next bytes; yields what is encoded of them by now."""
        for piece in self._pieces.feed(data):
            if encoded := self._frame.compress(piece):
                yield encoded

    def finish(self) -> bytes:
        """The rest, once all of the blob's bytes were fed."""
        return self._frame.flush()


class _Part(Enum):
    HEADER = auto()
    BLOCK_HEADER = auto()
    BLOCK = auto()
    END = auto()


class Decoder:
    """Decodes one blob; after an error it is of no further use."""

    def __init__(self, layout: BlobLayout) -> None:
        self._pieces = _Pieces(layout, unshuffle)
        window = 1 << WINDOW_LOG
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        self._frame = decompressor.decompressobj()
        self._header = frame_header(layout.size)
        # Kept until it is whole: the frame's header, or a block with its own.
        self._kept = bytearray()
        self._part = _Part.HEADER
        self._missing = len(self._header)  # bytes until the end of the part
        self._is_last = False

    def feed(self, data: memoryview) -> Iterator[bytes | bytearray]:
        """Take the next encoded bytes; yields the blob's, by pieces.

        Raises:
            EncodedBlobError: they are not those of a frame of this blob.
        """
        while data:
            if self._ended:
                raise EncodedBlobError("bytes follow the frame of a blob")
            self._kept += data[: self._missing]
            taken = min(self._missing, len(data))
            data, self._missing = data[taken:], self._missing - taken
            while self._missing == 0 and not self._ended:
                yield from self._leave()

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            EncodedBlobError: the frame is not complete.
        """
        if not self._ended:
            raise EncodedBlobError("the frame of a blob ends too early")

    @property
    def _ended(self) -> bool:
        return self._part is _Part.END

    def _leave(self) -> Iterator[bytes | bytearray]:
        """Go on from a part that is complete."""
        match self._part:
            case _Part.HEADER:
                if self._kept != self._header:
                    raise EncodedBlobError("a frame's header is not the derived one")
                self._decode()
                self._enter(_Part.BLOCK_HEADER, _BLOCK_HEADER_BYTES)
            case _Part.BLOCK_HEADER:
                fields = int.from_bytes(self._kept, "little")
                kind, size = fields >> 1 & 3, fields >> 3
                if kind == _RESERVED or size > _BLOCK_BYTES:
                    raise EncodedBlobError("a block of a frame is out of form")
                self._is_last = bool(fields & 1)
                self._enter(_Part.BLOCK, 1 if kind == _RLE else size)
            case _Part.BLOCK:
                decoded = self._decode()
                if self._is_last:
                    self._enter(_Part.END, 0)
                elif not decoded:
                    raise EncodedBlobError("a block of a frame is empty")
                else:
                    self._enter(_Part.BLOCK_HEADER, _BLOCK_HEADER_BYTES)
                yield from self._pieces.feed(decoded)

    def _enter(self, part: _Part, missing: int) -> None:
        self._part, self._missing = part, missing

    def _decode(self) -> bytes:
        try:
            decoded = self._frame.decompress(self._kept)
        except zstandard.ZstdError as error:
            raise EncodedBlobError("a frame cannot be decoded") from error
        self._kept.clear()
        # The library holds a frame to the size in its header: so does this.
        left = self._pieces.left - len(decoded)
        if left < 0 or (left and self._is_last):
            raise EncodedBlobError("a frame does not hold just the blob")
        return decoded


class _Pieces:
    """Cuts a blob's bytes into its pieces, and changes each.

    Attributes:
        left: bytes of the blob that were not fed yet.
    """

    def __init__(self, layout: BlobLayout, change: _Shuffle) -> None:
        self.left = layout.size
        self._change = change
        self._pieces = pieces(layout)
        self._piece = next(self._pieces)
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | bytearray]:
        """Take the blob's next bytes, at most `left`; yields what is complete."""
        view = memoryview(data)
        self.left -= len(view)
        while view:
            taken = self._piece.size - len(self._held)
            self._held += view[:taken]
            view = view[taken:]
            if len(self._held) == self._piece.size:
                yield self._change(self._held, self._piece.width)
                self._held = bytearray()
                self._piece = next(self._pieces, self._piece)
