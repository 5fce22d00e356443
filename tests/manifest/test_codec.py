"""Pieces, shuffle and frame header, against numpy and zstd themselves."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.blob_layout import DTYPE_BYTES
from kvport.manifest.codec import (
    PIECE_BYTES,
    WINDOW_LOG,
    Piece,
    frame_header,
    pieces,
    shuffle,
    unshuffle,
)
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import GIB
from tests.manifest.builder import ALL


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 50), st.randoms())
def test_a_shuffled_piece_is_the_transposed_one(width, values, random):
    data = random.randbytes(values * width)
    table = np.frombuffer(data, np.uint8).reshape(values, width)
    shuffled = shuffle(data, width)
    assert shuffled == table.T.tobytes()
    assert unshuffle(shuffled, width) == data


def test_pieces_are_those_of_header_and_tensors():
    layout = ALL.blob(BlobClass.KV, 4)
    assert list(pieces(layout)) == [
        Piece(len(layout.header), 1),
        *(Piece(t.nbytes, DTYPE_BYTES[t.dtype]) for t in layout.tensors),
    ]


def test_a_large_tensor_is_cut_from_its_own_start():
    leaves = (LeafSpec("a", "U8", (-1, 3)), LeafSpec("b", "F32", (-1, 3)))
    layout = StateLayout((CacheLayout("0", CacheKind.KV, None, leaves),)).blob(
        BlobClass.KV, 100_000
    )
    assert list(pieces(layout))[1:] == [
        Piece(300_000, 1),
        Piece(PIECE_BYTES, 4),
        Piece(1_200_000 - PIECE_BYTES, 4),
    ]


def test_tensors_without_bytes_have_no_piece():
    leaves = (LeafSpec("a", "F16", (1, 0, -1)), LeafSpec("b", "BF16", (-1, 2)))
    layout = StateLayout((CacheLayout("0", CacheKind.KV, None, leaves),)).blob(
        BlobClass.KV, 3
    )
    assert list(pieces(layout)) == [Piece(len(layout.header), 1), Piece(12, 2)]


@pytest.mark.parametrize(
    "size",
    [1, 255, 256, 65_791, 65_792, (1 << WINDOW_LOG) - 1, 1 << WINDOW_LOG,
     (1 << WINDOW_LOG) + 1, 5_000_000, GIB],
)  # fmt: skip
def test_a_frames_header_is_what_zstd_writes(size):
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=WINDOW_LOG, write_content_size=True
    )
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj(
        size=size
    )
    # A block's worth more than it holds back makes it write.
    written = frame.compress(bytes(min(size, 1 << 20)))
    written += frame.flush() if size <= 1 << 20 else b""
    header = frame_header(size)
    assert written.startswith(header)
    assert zstandard.frame_header_size(written) == len(header)
    found = zstandard.get_frame_parameters(header)
    assert (found.content_size, found.dict_id, found.has_checksum) == (size, 0, False)
