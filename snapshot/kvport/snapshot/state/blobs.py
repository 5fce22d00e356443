"""Leaves to blob bytes and back, without copying what need not be copied.

`to_buffers` gives a blob as a header and zero-copy views of the arrays' memory, ready
to be hashed and written by another thread. `Assembly` is the way back: it collects the
blobs of a path into one host buffer per leaf, and turns these into a model's caches. It
takes only verified bytes; the derived layout says where each tensor stands.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvport.manifest.errors import ArithmeticMismatchError
from kvport.manifest.layout import (
    BlobClass,
    CacheLayout,
    LayerClass,
    StateLayout,
)
from kvport.snapshot.state.kinds import DTYPES, rebuild
from kvport.snapshot.state.rows import Leaves

# numpy has no bfloat16; bytes are moved as unsigned integers of the same width.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_buffers(
    layout: StateLayout, blob_class: BlobClass, rows: int, leaves: Leaves
) -> list[memoryview]:
    """A blob as buffers whose concatenation is the blob.

    Args:
        layout: the model's layout.
        blob_class: which layers.
        rows: tokens in the segment; of no account for `state`.
        leaves: evaluated, contiguous arrays from `rows.take`.

    Raises:
        ArithmeticMismatchError: an array is not of the derived shape or dtype.
    """
    derived = layout.blob(blob_class, rows)
    buffers = [memoryview(derived.header)]
    for tensor in derived.tensors:
        array = leaves[tensor.cache, tensor.leaf]
        if array.shape != tensor.shape or array.dtype != DTYPES[tensor.dtype]:
            raise ArithmeticMismatchError(f"{tensor.name} does not fit the layout")
        buffers.append(_bytes(array.view(mx.uint8)))
    return buffers


class Assembly:
    """Host buffers of a state at `position`, filled blob by blob.

    Any thread may fill it: no mlx call is made before `caches`, which ends it.
    """

    def __init__(self, layout: StateLayout, position: int) -> None:
        self._layout = layout
        self._position = position
        self._host: list[list[NDArray[Any]]] = [
            [
                np.empty(
                    leaf.resolve(rows_of(cache, position)),
                    _CARRIERS[DTYPES[leaf.dtype].size],
                )
                for leaf in cache.leaves
            ]
            for cache in layout.caches
        ]
        # Which rows (the one state, for whole layers) blobs have brought, by cache.
        self._there = [
            np.full(rows_of(cache, position), not _has_bytes(cache))
            for cache in layout.caches
        ]

    def wants(self, blob_class: BlobClass, start: int, end: int) -> bool:
        """Whether the blob of this class of segment [start, end) holds needed rows."""
        if blob_class is BlobClass.STATE:
            return end == self._position
        if start >= self._position:
            return False
        if blob_class is BlobClass.KV or start < self._layout.head:
            return True
        return end > self._position - self._layout.max_window

    def add(
        self, blob_class: BlobClass, start: int, end: int, blob: memoryview
    ) -> None:
        """Copy the needed rows out of a blob of verified bytes.

        Raises:
            TensorHeaderError: the blob's header is not the derived one.
            ArithmeticMismatchError: the blob's size is not the derived one.
        """
        derived = self._layout.blob(blob_class, end - start)
        derived.check_header(bytes(blob[: len(derived.header)]))
        if len(blob) != derived.size:
            raise ArithmeticMismatchError("a blob does not have its derived size")
        for tensor in derived.tensors:
            host = self._host[tensor.cache][tensor.leaf]
            there = self._there[tensor.cache]
            data = blob[tensor.offset : tensor.offset + tensor.nbytes]
            found = np.frombuffer(data, host.dtype).reshape(tensor.shape)
            if blob_class is BlobClass.STATE:
                host[...], there[...] = found, True
                continue
            spec = self._layout.caches[tensor.cache]
            for into, out_of in _common(
                spec.rows(0, self._position), spec.rows(start, end)
            ):
                host[:, :, into], there[into] = found[:, :, out_of], True

    @property
    def complete(self) -> bool:
        """Whether all rows are there."""
        return all(there.all() for there in self._there)

    def caches(self) -> list[Any]:
        """The model's list of caches, evaluated in the calling thread.

        Raises:
            ArithmeticMismatchError: rows are missing: some blob was never added.
        """
        if not self.complete:
            raise ArithmeticMismatchError("a restored state is incomplete")
        # Each host buffer goes as soon as it is copied: the state is there once, not
        # twice, and one leaf.
        arrays = [
            [mx.array(hosts.pop(0)).view(DTYPES[leaf.dtype]) for leaf in cache.leaves]
            for cache, hosts in zip(self._layout.caches, self._host, strict=True)
        ]
        mx.eval(arrays)
        return rebuild(self._layout, arrays, self._position)


def _common(
    ours: Sequence[range], theirs: Sequence[range]
) -> Iterator[tuple[slice, slice]]:
    """Where positions that are in both stand in each, counted over all its ranges."""
    at = 0
    for mine in ours:
        source = 0
        for other in theirs:
            low, high = max(mine.start, other.start), min(mine.stop, other.stop)
            if low < high:
                into, out_of = at + low - mine.start, source + low - other.start
                yield (
                    slice(into, into + high - low),
                    slice(out_of, out_of + high - low),
                )
            source += len(other)
        at += len(mine)


def _has_bytes(cache: CacheLayout) -> bool:
    return any(0 not in leaf.shape for leaf in cache.leaves)


def rows_of(cache: CacheLayout, position: int) -> int:
    """Rows that a cache holds at a position; 1 stands for a whole layer's state."""
    if cache.layer_class is LayerClass.WHOLE:
        return 1
    return min(position, cache.window or position)


def _bytes(array: Any) -> memoryview:  # noqa: ANN401 - mlx arrays and numpy's
    """The memory of an evaluated, contiguous array, as bytes."""
    return memoryview(array).cast("B")
