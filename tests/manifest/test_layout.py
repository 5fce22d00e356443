import itertools
import struct

import attrs
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.blob_layout import DTYPE_BYTES, ROWS
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    FormatError,
    LimitExceededError,
    TensorHeaderError,
)
from kvport.manifest.layout import (
    CLASS_OF_KIND,
    BlobClass,
    CacheKind,
    CacheLayout,
    LayerClass,
    LeafSpec,
    StateLayout,
)
from tests.manifest.builder import ALL, DENSE, HYBRID, KV, WHOLE, WINDOW, WINDOWED

DIMENSIONS = st.integers(1, 5)
DTYPES = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def caches(draw, index):
    kind = draw(st.sampled_from(CacheKind))
    leaves = []
    for name in draw(st.lists(st.sampled_from("kvsx"), min_size=1, unique=True)):
        shape = draw(st.lists(DIMENSIONS, max_size=3))
        if kind is not CacheKind.ARRAYS:
            shape.insert(draw(st.integers(0, len(shape))), ROWS)
        leaves.append(LeafSpec(name, draw(DTYPES), tuple(shape or [1])))
    numbers = {"window": None}
    if CLASS_OF_KIND[kind] is LayerClass.WINDOWED:
        numbers["window"] = draw(st.integers(1, 9))
    if kind is CacheKind.ROTATING:
        numbers["keep"] = draw(st.integers(0, numbers["window"] - 1))
    if kind is CacheKind.QUANTIZED:
        numbers |= {"bits": draw(st.integers(1, 8)), "group_size": 64}
    if kind is CacheKind.ARRAYS:
        numbers["slots"] = len(leaves) + draw(st.integers(0, 2))
    return CacheLayout(path=str(index), kind=kind, leaves=tuple(leaves), **numbers)


@st.composite
def layouts(draw):
    # Eleven caches, so that names sort otherwise than numbers do.
    return StateLayout(tuple(draw(caches(index)) for index in range(11)))


@given(layouts(), st.integers(1, 12))
def test_the_derived_blob_is_one_that_safetensors_reads(layout, rows):
    for blob_class in layout.blob_classes:
        blob = layout.blob(blob_class, rows)
        data = blob.header + bytes(i % 251 for i in range(blob.size - len(blob.header)))
        found = dict(safetensors.deserialize(data))
        assert found.keys() == {tensor.name for tensor in blob.tensors}
        for tensor in blob.tensors:
            assert found[tensor.name]["dtype"] == tensor.dtype
            assert tuple(found[tensor.name]["shape"]) == tensor.shape
            there = data[tensor.offset : tensor.offset + tensor.nbytes]
            assert found[tensor.name]["data"] == there
            leaf = layout.caches[tensor.cache].leaves[tensor.leaf]
            assert leaf.dtype == tensor.dtype


@given(layouts())
def test_a_layout_survives_its_json(layout):
    assert StateLayout.from_json(layout.to_json()) == layout


def test_the_header_is_written_out_as_documented():
    text = (
        b'{"0.k":{"dtype":"F16","shape":[1,2,4,3],"data_offsets":[0,48]},'
        b'"0.v":{"dtype":"F16","shape":[1,2,4,3],"data_offsets":[48,96]}}'
    )
    text += b" " * (-len(text) % 8)
    blob = DENSE.blob(BlobClass.KV, 4)
    assert blob.header == struct.pack("<Q", len(text)) + text
    assert blob.size == 8 + len(text) + 96


def test_windowed_layers_keep_no_more_rows_than_their_window():
    shapes = [WINDOWED.blob(BlobClass.WINDOW, n).tensors[0].shape for n in (2, 3, 4)]
    assert shapes == [(1, 2, 2), (1, 3, 2), (1, 3, 2)]


ROWS_OF_WINDOWS = st.tuples(st.integers(1, 12), st.integers(0, 11)).filter(
    lambda w: w[1] < w[0]
)


@given(ROWS_OF_WINDOWS, st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_segments_hold_what_a_window_needs_and_no_row_that_it_dropped(window, steps):
    """Whatever the cuts, the rows at the end are there, and all were when cut."""
    size, keep = window
    cache = attrs.evolve(WINDOW, window=size, keep=keep)
    start, found = 0, set()
    for step in steps:
        end = start + step
        rows = [*itertools.chain(*cache.rows(start, end))]
        assert len(rows) == min(step, size) == len(set(rows))
        assert rows == sorted(rows)
        # What a ring holds at the segment's end, and no more.
        assert all(row < keep or end - row <= size - keep for row in rows)
        found.update(rows)
        start = end
    needed = {*range(min(keep, end)), *range(max(0, end - (size - keep)), end)}
    assert needed <= found
    assert [*itertools.chain(*cache.rows(0, end))] == sorted(needed)


def test_the_head_of_a_layout_is_the_largest_keep():
    assert ALL.head == 0
    kept = attrs.evolve(WINDOW, path="3", keep=2)
    assert StateLayout((*ALL.caches, kept)).head == 2


def test_the_classes_of_blobs_follow_from_the_caches():
    assert DENSE.blob_classes == (BlobClass.KV,)
    assert HYBRID.blob_classes == (BlobClass.KV, BlobClass.STATE)
    assert ALL.blob_classes == (BlobClass.KV, BlobClass.WINDOW, BlobClass.STATE)
    assert DENSE.full_only
    assert not WINDOWED.full_only
    assert ALL.max_window == 3


def test_a_header_that_differs_in_one_byte_is_refused():
    blob = DENSE.blob(BlobClass.KV, 4)
    blob.check_header(blob.header)
    for at in range(len(blob.header)):
        other = bytearray(blob.header)
        other[at] ^= 1
        with pytest.raises(TensorHeaderError):
            blob.check_header(bytes(other))


def test_there_are_no_blobs_without_rows_or_of_foreign_classes():
    with pytest.raises(ArithmeticMismatchError):
        DENSE.blob(BlobClass.KV, 0)
    with pytest.raises(ArithmeticMismatchError):
        DENSE.blob(BlobClass.STATE, 1)


def test_a_blob_is_limited_in_size():
    large = CacheLayout("0", CacheKind.KV, None, (LeafSpec("k", "F32", (1 << 20, -1)),))
    with pytest.raises(LimitExceededError):
        StateLayout((large,)).blob(BlobClass.KV, 257)


def edited(cache, /, **fields):
    return {**StateLayout((cache,)).to_json()[0], **fields}


def leaf(**fields):
    return {"dtype": "F16", "name": "k", "shape": [1, -1], **fields}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        ["0"],
        [edited(KV, kind="KVCache")],
        [edited(KV, **{"class": "whole"})],
        [edited(KV, window=4)],
        [edited(KV, cache="00")],
        [edited(KV, cache="../0")],
        [edited(KV, cache=0)],
        [edited(KV, extra=1)],
        [edited(KV), edited(KV)],
        [edited(WINDOW), edited(KV)],
        [edited(KV), edited(WINDOW, cache="0.0")],
        [{k: v for k, v in edited(WINDOW).items() if k != "window"}],
        [edited(WINDOW, window=0)],
        [edited(WINDOW, window=True)],
        [edited(WINDOW, window=1 << 31)],
        [{k: v for k, v in edited(WINDOW).items() if k != "keep"}],
        [edited(WINDOW, keep=-1)],
        [edited(WINDOW, keep=3)],
        [edited(WINDOW, keep=1 << 31, window=1 << 30)],
        [edited(WINDOW, keep=True)],
        [edited(WINDOW, keep=None)],
        [edited(WINDOW, keep=1.0)],
        [edited(WINDOW, kind="chunked", keep=0)],
        [edited(KV, keep=0)],
        [edited(WHOLE, leaves=[leaf()])],
        [edited(WHOLE, leaves=[leaf(shape=[])])],
        [edited(WHOLE, leaves=[leaf(shape=[1] * 9)])],
        [edited(KV, leaves=[leaf(shape=[1, 2])])],
        [edited(KV, leaves=[leaf(shape=[-1, -1])])],
        [edited(KV, leaves=[leaf(shape=[])])],
        [edited(KV, leaves=[leaf(shape=[-2, -1])])],
        [edited(WHOLE, slots=0)],
        [edited(WHOLE, slots=1 << 20)],
        [edited(WHOLE, leaves=[leaf(name=f"s{i}", shape=[1]) for i in range(9)])],
        [edited(KV, bits=8, group_size=64)],
        [edited(KV, leaves=[leaf(shape=[True, -1])])],
        [edited(KV, leaves=[leaf(shape=[1 << 31, -1])])],
        [edited(KV, leaves=[leaf(dtype="f16")])],
        [edited(KV, leaves=[leaf(dtype="F8_E4M3")])],
        [edited(KV, leaves=[leaf(name="K")])],
        [edited(KV, leaves=[leaf(name="__metadata__")])],
        [edited(KV, leaves=[leaf(), leaf()])],
        [edited(KV, leaves=[])],
        [edited(KV, leaves=[leaf(name=f"a{i}") for i in range(65)])],
        [edited(KV, cache=str(i)) for i in range(4097)],
    ],
)
def test_what_is_not_a_layout_is_refused(value):
    with pytest.raises((FormatError, LimitExceededError)):
        StateLayout.from_json(value)
