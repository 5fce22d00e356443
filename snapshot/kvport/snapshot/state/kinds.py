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
    KVCache,
    RotatingKVCache,
)

from kvport.manifest.layout import (
    ROWS,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.untyped import Cache

KIND_OF_TYPE: Final[dict[type, CacheKind]] = {
    KVCache: CacheKind.KV,
    BatchKVCache: CacheKind.KV,
    RotatingKVCache: CacheKind.ROTATING,
    BatchRotatingKVCache: CacheKind.ROTATING,
    ArraysCache: CacheKind.ARRAYS,
}

DTYPES: Final = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16,
    "I16": mx.int16, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32,
    "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
}  # fmt: skip
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def flatten(caches: Sequence[Cache]) -> Iterator[tuple[str, Cache]]:
    """(path, cache object) in layout order; members of a list as `3.0`, `3.1`."""
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            for path, member in flatten(cache.caches):
                yield f"{index}.{path}", member
        else:
            yield str(index), cache


def leaves(cache: Cache) -> tuple[mx.array, ...]:
    """A cache object's tensors, in the order of its layout's leaves.

    Rows of KV and rotating caches come as the object holds them: see rows.py.
    """
    if isinstance(cache, ArraysCache):
        return tuple(cache.cache)
    return (cache.keys, cache.values)


def describe(path: str, cache: Cache) -> CacheLayout:
    """Layout of a live solo cache that has seen at least one token.

    Raises:
        UnsupportedModelError: a kind, an option or a leaf that is not carried.
    """
    name = f"cache {path} ({type(cache).__name__})"
    kind = KIND_OF_TYPE.get(type(cache))
    if kind is None:
        raise UnsupportedModelError(f"{name} is of a kind that is not carried")
    if kind is CacheKind.ROTATING and cache.keep:
        raise UnsupportedModelError(f"{name} keeps its first {cache.keep} rows")
    arrays = leaves(cache)
    for array in arrays:
        if not getattr(array, "size", 0):  # a slot that was never set is None
            raise UnsupportedModelError(f"{name} has an empty leaf")
        if array.dtype not in _DTYPE_NAMES or array.shape[0] != 1:
            raise UnsupportedModelError(f"{name} has a leaf of an unknown form")
    if kind is CacheKind.ARRAYS:
        specs = tuple(
            LeafSpec(f"s{i}", _DTYPE_NAMES[array.dtype], tuple(array.shape))
            for i, array in enumerate(arrays)
        )
        return CacheLayout(path, kind, None, specs)
    specs = tuple(
        LeafSpec(leaf, _DTYPE_NAMES[array.dtype], _with_rows(name, array))
        for leaf, array in zip("kv", arrays, strict=True)
    )
    window = cache.max_size if kind is CacheKind.ROTATING else None
    return CacheLayout(path, kind, window, specs)


def _with_rows(name: str, array: mx.array) -> tuple[int, ...]:
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
        arrays: for each cache of the layout its leaves: all rows (full), the last
            min(position, window) rows in time order (windowed), the state (whole).
        position: tokens in the state.
    """
    flat = [
        (cache.path.split("."), _rebuild_one(cache, found, position))
        for cache, found in zip(layout.caches, arrays, strict=True)
    ]
    return _nest(flat)


def _nest(flat: list[tuple[list[str], Cache]]) -> list[Cache]:
    nested: list[Cache] = []
    groups: dict[str, list[tuple[list[str], Cache]]] = {}
    for path, cache in flat:
        groups.setdefault(path[0], []).append((path[1:], cache))
    for members in groups.values():
        if members[0][0]:
            nested.append(CacheList(*_nest(members)))
        else:
            nested.append(members[0][1])
    return nested


def _rebuild_one(
    layout: CacheLayout, arrays: Sequence[mx.array], position: int
) -> Cache:
    if layout.kind is CacheKind.ARRAYS:
        cache = ArraysCache(len(arrays))
        cache.cache = list(arrays)
        return cache
    if layout.kind is CacheKind.ROTATING:
        cache = RotatingKVCache(max_size=layout.window)
        cache._idx = arrays[0].shape[2]  # noqa: SLF001 - its constructor has no such argument
    else:
        cache = KVCache()
    cache.keys, cache.values = arrays
    cache.offset = position
    return cache
