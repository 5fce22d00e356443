"""Blobs encoded with `shuffle-zstd`: frames written by hand, and one by the library.

By hand: raw and run-length blocks only, which a reader needs no zstd for.
"""

import copy
import struct

import attrs

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.codec import frame_header, pieces, shuffle
from kvport.manifest.digests import blob_digest
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.ustar import blob_name
from kvport.snapshot.transfer.codec import Encoder
from tests.manifest.builder import ManifestBuilder, pack

LONG = StateLayout(
    (CacheLayout("0", CacheKind.KV, None, (LeafSpec("k", "F32", (1, -1, 64)),)),)
)


@attrs.frozen(kw_only=True)
class EvenBuilder(ManifestBuilder):
    """One segment whose bytes compress well."""

    layout: StateLayout = LONG
    tokens: tuple[int, ...] = (1, 2, 3, 4)
    cuts: tuple[int, ...] = ()
    points: dict[int, tuple[PointKind, ...]] = attrs.field(factory=dict)

    def content(self, blob_class: BlobClass, start: int, end: int) -> bytes:
        layout = self._layout(blob_class, start, end)
        return layout.header + b"\0\0\x80\x3f" * (
            (layout.size - len(layout.header)) // 4
        )


ENCODED = EvenBuilder()


def _layout() -> BlobLayout:
    return LONG.blob(BlobClass.KV, 4)


def _block(kind: int, size: int, data: bytes, *, last: bool) -> bytes:
    return struct.pack("<I", last | kind << 1 | size << 3)[:3] + data


def frame_of(
    *, drop: int = 0, more: int = 0, last: bool = True, kind: int = 1, value: int = 0
) -> bytes:
    """The frame of the one blob, or one with a fault.

    Args:
        drop: bytes that are missing at the end.
        more: bytes that are too many.
        last: whether the last block is marked so.
        kind: type of the last block; 1 is a run.
        value: of the last run.
    """
    blob = ENCODED.content(BlobClass.KV, 0, 4)
    layout = _layout()
    out, at = [frame_header(layout.size)], 0
    for piece in pieces(layout):
        shuffled = bytes(shuffle(blob[at : at + piece.size], piece.width))
        at += piece.size
        if piece.width == 1:
            out.append(_block(0, piece.size, shuffled, last=False))
            continue
        quarter = piece.size // 4
        runs = [(shuffled[n * quarter], quarter) for n in range(4)]
        for index, (byte, count) in enumerate(runs):
            is_last = index == 3
            size = count + is_last * (more - drop)
            out.append(
                _block(
                    kind if is_last else 1,
                    size,
                    bytes([byte ^ (value if is_last else 0)]),
                    last=is_last and last,
                )
            )
    return b"".join(out)


def frame_by_library() -> bytes:
    """The frame that an export writes, with blocks that only zstd decodes."""
    encoder = Encoder(_layout())
    blob = ENCODED.content(BlobClass.KV, 0, 4)
    return b"".join(encoder.feed(blob)) + encoder.finish()


def encoded(frame: bytes) -> bytes:
    """A container with this frame, whose size is signed."""
    value = copy.deepcopy(ENCODED.payload())
    [blob] = value["segments"][0]["blobs"]
    blob.update(codec="shuffle-zstd", encoded_size=len(frame))
    content = ENCODED.content(BlobClass.KV, 0, 4)
    return pack(
        [
            ("envelope.json", ENCODED.signed(value)),
            ("tokens", ENCODED.token_bytes),
            (blob_name(blob_digest(content)), frame),
        ]
    )
