"""Cache objects of mlx-lm: which kinds are carried, their leaves, how to rebuild one.

A closed registry, keyed by `CacheKind`, never by a class name from a file. Types are
matched exactly: a subclass may keep state that its parent does not have.

`flatten` walks a model's list of caches into (path, cache) pairs, members of a cache
list one by one, solo and batched alike; `describe` gives a live solo cache's
layout; `rebuild` makes the list that the model takes from canonical arrays.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvport.manifest.blob_layout import ROWS
from kvport.manifest.layout import CacheKind, CacheLayout, LeafSpec, StateLayout
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.untyped import Cache, set_ring_index

KIND_OF_TYPE: Final[dict[type, CacheKind]] = {
    KVCache: CacheKind.KV,
    BatchKVCache: CacheKind.KV,
    QuantizedKVCache: CacheKind.QUANTIZED,
    ChunkedKVCache: CacheKind.CHUNKED,
    RotatingKVCache: CacheKind.ROTATING,
    BatchRotatingKVCache: CacheKind.ROTATING,
    ArraysCache: CacheKind.ARRAYS,
}

DTYPES: Final = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16,
    "I16": mx.int16, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32,
    "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
}  # fmt: skip
_QUANTIZED: Final = ("kq", "ks", "kb", "vq", "vs", "vb")
"""Packed values, scales and biases, of keys and of values."""
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def flatten(caches: Sequence[Cache]) -> Iterator[tuple[str, Cache]]:
    """(path, cache object) in layout order; members of a list as `3.0`, `3.1`."""
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            for path, member in flatten(cache.caches):
                yield f"{index}.{path}", member
        else:
            yield str(index), cache


def leaves(cache: Cache) -> dict[str, mx.array]:
    """A cache object's tensors by the names of its layout's leaves, in their order.

    Rows of KV, rotating and chunked caches come as the object holds them: see rows.py.
    Slots of an arrays cache that were never set have no leaf.
    """
    match KIND_OF_TYPE[type(cache)]:
        case CacheKind.ARRAYS:
            arrays = enumerate(cache.cache)
            return {f"s{i}": array for i, array in arrays if array is not None}
        case CacheKind.QUANTIZED:
            return dict(zip(_QUANTIZED, (*cache.keys, *cache.values), strict=True))
        case _:
            return {"k": cache.keys, "v": cache.values}


def describe(path: str, cache: Cache) -> CacheLayout:
    """Layout of a live solo cache that has seen at least one token.

    Raises:
        UnsupportedModelError: a kind, an option or a leaf that is not carried.
    """
    name = f"cache {path} ({type(cache).__name__})"
    kind = KIND_OF_TYPE.get(type(cache))
    if kind is None:
        raise UnsupportedModelError(f"{name} is of a kind that is not carried")
    if kind is CacheKind.ROTATING and not 0 <= cache.keep < cache.max_size:
        raise UnsupportedModelError(f"{name} keeps as many rows as it has")
    specs = tuple(
        LeafSpec(leaf, _dtype(name, array), _shape(name, kind, array))
        for leaf, array in leaves(cache).items()
    )
    match kind:
        case CacheKind.ARRAYS:
            return CacheLayout(path, kind, None, specs, slots=len(cache.cache))
        case CacheKind.QUANTIZED:
            bits, group = cache.bits, cache.group_size
            return CacheLayout(path, kind, None, specs, bits=bits, group_size=group)
        case CacheKind.ROTATING:
            return CacheLayout(path, kind, cache.max_size, specs, keep=cache.keep)
        case CacheKind.CHUNKED:
            return CacheLayout(path, kind, cache.chunk_size, specs)
        case _:
            return CacheLayout(path, kind, None, specs)


def _dtype(name: str, array: mx.array) -> str:
    if array.dtype not in _DTYPE_NAMES:
        raise UnsupportedModelError(f"{name} has a leaf of an unknown dtype")
    return _DTYPE_NAMES[array.dtype]


def _shape(name: str, kind: CacheKind, array: mx.array) -> tuple[int, ...]:
    if array.shape[:1] != (1,):
        raise UnsupportedModelError(f"{name} has a leaf that is not one sequence's")
    if kind is CacheKind.ARRAYS:
        return tuple(array.shape)
    if array.ndim != 4:
        raise UnsupportedModelError(f"{name} does not have four dimensions")
    batch, heads, _, width = array.shape
    return (batch, heads, ROWS, width)


def rebuild(
    layout: StateLayout, arrays: Sequence[Sequence[mx.array]], position: int
) -> list[Cache]:
    """The list of caches that a model takes, at `position`, from canonical arrays.

    Args:
        layout: the model's layout.
        arrays: for each cache of the layout its leaves: the rows of
            `CacheLayout.rows(0, position)` (full, windowed), or the state (whole).
        position: tokens in the state.
    """
    flat = [
        (cache.path.split("."), _rebuild_one(cache, found, position))
        for cache, found in zip(layout.caches, arrays, strict=True)
    ]
    return nest(flat)


def nest(flat: list[tuple[list[str], Cache]]) -> list[Cache]:
    """The list that a model takes, of caches in layout order by their split paths."""
    nested: list[Cache] = []
    groups: dict[str, list[tuple[list[str], Cache]]] = {}
    for path, cache in flat:
        groups.setdefault(path[0], []).append((path[1:], cache))
    for members in groups.values():
        if members[0][0]:
            nested.append(CacheList(*nest(members)))
        else:
            nested.append(members[0][1])
    return nested


def _rebuild_one(
    layout: CacheLayout, arrays: Sequence[mx.array], position: int
) -> Cache:
    match layout.kind:
        case CacheKind.ARRAYS:
            cache = ArraysCache(layout.slots)
            for leaf, array in zip(layout.leaves, arrays, strict=True):
                cache[int(leaf.name.removeprefix("s"))] = array
            return cache
        case CacheKind.QUANTIZED:
            cache = QuantizedKVCache(layout.group_size, layout.bits)
            cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
            cache.offset = position
            return cache
        case CacheKind.ROTATING:
            cache = RotatingKVCache(layout.window, layout.keep)
            set_ring_index(cache, arrays[0].shape[2])
        case CacheKind.CHUNKED:
            cache = ChunkedKVCache(layout.window)
            cache.start_position = position - arrays[0].shape[2]
        case _:
            cache = KVCache()
    cache.keys, cache.values = arrays
    cache.offset = position
    return cache
