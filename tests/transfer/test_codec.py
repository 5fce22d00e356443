"""One blob there and back, and every frame that is not the one of its blob."""

import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.blob_layout import DTYPE_BYTES, BlobLayout
from kvport.manifest.codec import PIECE_BYTES, frame_header, pieces, shuffle
from kvport.manifest.errors import EncodedBlobError
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import GIB, MIB
from kvport.snapshot.transfer.codec import Decoder, Encoder

BLOCK = 1 << 17


def layout_of(*leaves: LeafSpec, rows: int = 3) -> BlobLayout:
    return StateLayout((CacheLayout("0", CacheKind.KV, None, leaves),)).blob(
        BlobClass.KV, rows
    )


def bytes_layout(size: int) -> BlobLayout:
    """A blob with one tensor of `size` bytes."""
    return layout_of(LeafSpec("a", "U8", (-1, 1)), rows=size)


def encode(layout: BlobLayout, blob: bytes, step: int = MIB) -> bytes:
    encoder, parts = Encoder(layout), []
    for start in range(0, len(blob), step):
        parts += encoder.feed(blob[start : start + step])
    return b"".join([*parts, encoder.finish()])


def decode(layout: BlobLayout, data: bytes, step: int = MIB) -> bytes:
    decoder, parts = Decoder(layout), []
    for start in range(0, len(data), step):
        parts += decoder.feed(memoryview(data)[start : start + step])
    decoder.finish()
    return b"".join(parts)


def blob_of(layout: BlobLayout, body: bytes) -> bytes:
    return layout.header + body


# There and back.

LEAVES = st.lists(
    st.tuples(
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 4), max_size=2),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda found: [
        LeafSpec(f"l{n}", dtype, (1, -1, *shape))
        for n, (dtype, shape) in enumerate(found)
    ]
)


@given(LEAVES, st.integers(1, 300), st.integers(1, 4000), st.binary(min_size=1))
def test_a_blob_comes_back_whatever_its_layout(leaves, rows, step, data):
    layout = layout_of(*leaves, rows=rows)
    length = layout.size - len(layout.header)
    blob = blob_of(layout, (data * length)[:length])
    encoded = encode(layout, blob)
    assert encode(layout, blob, step) == encoded
    assert decode(layout, encoded, step) == blob


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_tensors_of_several_pieces_come_back(dtype):
    leaf = LeafSpec("a", dtype, (-1, 3))
    layout = layout_of(leaf, LeafSpec("b", "U8", (-1, 1)), rows=300_007)
    values = (layout.size - len(layout.header)) // 8 + 1
    body = b"".join((n * n).to_bytes(8, "little") for n in range(values))
    blob = blob_of(layout, body[: layout.size - len(layout.header)])
    encoded = encode(layout, blob)
    assert len(encoded) < len(blob)
    assert decode(layout, encoded) == blob


def test_what_is_compressed_is_the_shuffled_blob():
    layout = layout_of(LeafSpec("a", "F32", (-1, 5)), LeafSpec("b", "BF16", (-1, 5)))
    blob = blob_of(layout, bytes(range(90)))
    at, expected = 0, b""
    for piece in pieces(layout):
        expected += shuffle(blob[at : at + piece.size], piece.width)
        at += piece.size
    found = zstandard.ZstdDecompressor().decompress(encode(layout, blob))
    assert found == expected != blob


def test_shuffled_floats_are_smaller():
    # As states are: a narrow range of exponents, noise in the mantissa.
    layout = layout_of(LeafSpec("a", "F32", (-1, 64)), rows=1000)
    noise = [(n * 2654435761) % (1 << 23) for n in range(64_000)]
    body = b"".join((127 << 23 | bits).to_bytes(4, "little") for bits in noise)
    blob = blob_of(layout, body)
    plain = zstandard.ZstdCompressor(level=1).compress(blob)
    assert len(encode(layout, blob)) < 0.9 * len(plain)


# What is refused. `LAYOUT`'s blob is 8 KiB of noise: its frame has one raw block, or
# two, as they are made here.

LAYOUT = bytes_layout(8192)
BLOB = blob_of(LAYOUT, bytes(n * n * 7 % 251 for n in range(8192)))
FRAME = encode(LAYOUT, BLOB)
HEADER = frame_header(LAYOUT.size)


def block(content: bytes, *, kind: int = 0, last: bool = False, size=None) -> bytes:
    size = len(content) if size is None else size
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + content


def frame_of(data: bytes, **parameters) -> bytes:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(
            1, **parameters
        )
    )
    return compressor.compress(data)


def test_a_frame_of_blocks_that_were_made_here_is_taken():
    made = HEADER + block(BLOB[:100]) + block(BLOB[100:], last=True)
    assert decode(LAYOUT, made) == BLOB
    closed = HEADER + block(BLOB) + block(b"", last=True)
    assert decode(LAYOUT, closed) == BLOB


DAMAGED = bytearray(FRAME)
DAMAGED[len(FRAME) // 2 :] = bytes(len(FRAME) - len(FRAME) // 2)
FRAMES = {
    "no_frame": ("header", BLOB),
    "another_magic": ("header", b"\x29" + FRAME[1:]),
    "a_skippable_frame_first": ("header", b"\x50\x2a\x4d\x18\0\0\0\0" + FRAME),
    "a_larger_content_size": ("header", frame_of(BLOB + b"x")),
    "a_smaller_content_size": ("header", frame_of(BLOB[:-1])),
    "no_content_size": ("header", frame_of(BLOB, write_content_size=False)),
    "a_checksum": ("header", frame_of(BLOB, write_checksum=True)),
    "a_dictionary": (
        "header",
        HEADER[:4] + bytes([HEADER[4] | 1]) + HEADER[5:7] + b"\x07" + FRAME[7:],
    ),
    "a_reserved_bit": ("header", HEADER[:4] + bytes([HEADER[4] | 8]) + FRAME[5:]),
    "a_window_although_none_is_needed": (
        "header",
        HEADER[:4] + bytes([HEADER[4] & ~0x20]) + b"\x50" + FRAME[5:],
    ),
    "a_reserved_block": ("out of form", HEADER + block(BLOB, kind=3, last=True)),
    "a_block_above_its_limit": (
        "out of form",
        HEADER + block(BLOB, kind=1, last=True, size=BLOCK + 1),
    ),
    "an_empty_block": ("is empty", HEADER + block(b"") + block(BLOB, last=True)),
    "more_than_the_blob": ("be decoded", HEADER + block(BLOB + b"x", last=True)),
    "more_than_the_blob_in_several_blocks": (
        "be decoded",
        HEADER + block(BLOB) + block(b"x", last=True),
    ),
    "less_than_the_blob": ("be decoded", HEADER + block(BLOB[:-1], last=True)),
    "a_block_that_is_damaged": ("be decoded", bytes(DAMAGED)),
    "a_block_that_is_no_compressed_one": (
        "be decoded",
        HEADER + block(BLOB[:100], kind=2, last=True),
    ),
    "bytes_after_the_frame": ("follow the frame", FRAME + b"\0"),
    "a_second_frame": ("follow the frame", FRAME + FRAME),
    "a_second_frame_of_nothing": ("follow the frame", FRAME + frame_of(b"")),
    "a_skippable_frame_after_it": (
        "follow the frame",
        FRAME + b"\x50\x2a\x4d\x18\0\0\0\0",
    ),
}


@pytest.mark.parametrize("step", [MIB, 1])
@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_with(name, step):
    message, data = FRAMES[name]
    with pytest.raises(EncodedBlobError, match=message):
        decode(LAYOUT, data, step)


def test_a_frame_that_is_cut_anywhere():
    for length in range(len(FRAME)):
        with pytest.raises(EncodedBlobError, match="ends too early"):
            decode(LAYOUT, FRAME[:length])


def test_a_frame_with_one_flipped_bit_is_no_frame_or_of_another_blob():
    layout = layout_of(LeafSpec("a", "F16", (-1, 64)), rows=16)
    body = b"".join((n % 97 | 0x3C00).to_bytes(2, "little") for n in range(1024))
    blob = blob_of(layout, body)
    frame = encode(layout, blob)
    refused = changed = 0
    for place in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[place // 8] ^= 1 << place % 8
        try:
            # Its digest tells it from the blob that was signed.
            changed += decode(layout, bytes(flipped)) != blob
        except EncodedBlobError:
            refused += 1
    assert refused
    assert changed
    assert refused + changed == 8 * len(frame)


@pytest.mark.parametrize("log", [19, 21, 27])
def test_a_frame_with_another_window(log):
    layout = bytes_layout(3 * MIB)
    blob = blob_of(layout, bytes(3 * MIB))
    assert decode(layout, frame_of(blob, window_log=20)) == blob
    with pytest.raises(EncodedBlobError, match="header"):
        decode(layout, frame_of(blob, window_log=log))


def test_a_frame_that_needs_the_whole_blob_as_its_window():
    layout = bytes_layout(3 * MIB)
    size = layout.size.to_bytes(4, "little")
    frame = b"\x28\xb5\x2f\xfd\xa0" + size + block(b"\0", kind=1, size=BLOCK)
    assert zstandard.get_frame_parameters(frame).window_size == layout.size
    with pytest.raises(EncodedBlobError, match="header"):
        decode(layout, frame)


def bomb(content_size: int, nbytes: int) -> bytes:
    """A frame of four bytes to every 128 KiB."""
    assert nbytes % BLOCK == 0
    return frame_header(content_size) + block(b"\0", kind=1, size=BLOCK) * (
        nbytes // BLOCK
    )


def test_a_bomb_costs_no_memory():
    frame = bomb(LAYOUT.size, 16 * GIB)
    assert len(frame) < MIB
    tracemalloc.start()
    try:
        with pytest.raises(EncodedBlobError, match="be decoded"):
            decode(LAYOUT, frame)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_blob_of_gigabytes_is_decoded_in_pieces():
    layout = bytes_layout(GIB)
    decoder, length = Decoder(layout), 0
    frame = memoryview(bomb(layout.size, 256 * MIB))
    tracemalloc.start()
    try:
        # All of the frame at once, as one chunk of a request.
        for piece in decoder.feed(frame):
            assert len(piece) <= PIECE_BYTES
            length += len(piece)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert 255 * MIB <= length <= 256 * MIB
    with pytest.raises(EncodedBlobError, match="ends too early"):
        decoder.finish()
