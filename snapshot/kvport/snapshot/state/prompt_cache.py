"""Prompt cache files of mlx-lm, read: from a stranger's file to live caches.

A class's name picks nothing: the model's layout says which kind stands where, and the
file must agree, in every number, dtype and shape, before an array is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvport.manifest.blob_layout import ROWS
from kvport.manifest.layout import (
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
    row_axis,
)
from kvport.manifest.limits import TOKENS
from kvport.snapshot.errors import PromptCacheError, PromptCacheMismatchError
from kvport.snapshot.state.kinds import DTYPES, nest
from kvport.snapshot.state.prompt_cache_forms import Tree, read_states
from kvport.snapshot.state.tensor_files import Tensor, TensorFile
from kvport.snapshot.state.untyped import Cache

TYPE_OF_KIND: Final[Mapping[CacheKind, type]] = {
    CacheKind.KV: KVCache,
    CacheKind.QUANTIZED: QuantizedKVCache,
    CacheKind.ROTATING: RotatingKVCache,
    CacheKind.CHUNKED: ChunkedKVCache,
    CacheKind.ARRAYS: ArraysCache,
}
_NAMES: Final = {cls.__name__ for cls in (*TYPE_OF_KIND.values(), CacheList)}


@attrs.frozen
class PromptCache:
    """What a file holds.

    Attributes:
        caches: live caches, evaluated, as mlx-lm itself would load them.
        position: tokens in them; None if no cache counts them.
    """

    caches: list[Cache]
    position: int | None


def read_prompt_cache(file: BinaryIO, layout: StateLayout) -> PromptCache:
    """Read a file of either form for a model.

    Args:
        file: can be sought in.
        layout: the model's.

    Raises:
        PromptCacheError: the file is damaged, or of no form that mlx-lm writes.
        PromptCacheMismatchError: it is not of this model.
        OSError: it cannot be read.
    """
    opened = TensorFile.of(file)
    found = list(_flat(*read_states(opened)))
    paths = [path for path, _, _ in found]
    if paths != [spec.path for spec in layout.caches]:
        raise PromptCacheMismatchError(
            f"the file has {len(paths)} caches, not the model's {len(layout.caches)}"
        )
    pairs = list(zip(layout.caches, found, strict=True))
    positions = {
        held
        for spec, (_, name, state) in pairs
        if (held := _checked(spec, name, state)) is not None
    }
    if len(positions) > 1:
        raise PromptCacheError("the file's caches hold different numbers of tokens")
    caches = [
        (spec.path.split("."), _live(opened, spec.kind, state))
        for spec, (_, _, state) in pairs
    ]
    mx.eval([cache.state for _, cache in caches])
    return PromptCache(nest(caches), next(iter(positions), None))


def _flat(
    names: Sequence[object], states: Sequence[Tree], prefix: str = ""
) -> Iterator[tuple[str, str, Tree]]:
    """(path, class, state), members of lists one by one."""
    for index, (name, state) in enumerate(zip(names, states, strict=True)):
        path = f"{prefix}{index}"
        if not isinstance(name, str) or name not in _NAMES:
            raise PromptCacheError(f"cache {path} of the file is of an unknown class")
        if name != CacheList.__name__:
            yield path, name, state
            continue
        members = state if isinstance(state, list) else []
        if not members or any(
            not isinstance(member, list) or len(member) != len(("state", "class"))
            for member in members
        ):
            raise PromptCacheError(f"list {path} of the file has an unknown form")
        inner, classes = [m[0] for m in members], [m[1] for m in members]
        yield from _flat(classes, inner, f"{path}.")


def _checked(spec: CacheLayout, name: str, state: Tree) -> int | None:
    """Tokens in a cache that fits its layout; None if it does not count them."""
    expected = TYPE_OF_KIND[spec.kind].__name__
    if name != expected:
        raise PromptCacheMismatchError(
            f"cache {spec.path} is a {name} where the model has a {expected}"
        )
    match spec.kind, state:
        case CacheKind.ARRAYS, [list(slots), None, None]:
            _check_slots(spec, slots)
            return None
        case CacheKind.KV, [k, v, int(offset)]:
            _check_rows(spec, [k, v], offset)
        case CacheKind.QUANTIZED, [[*ks], [*vs], int(offset), int(group), int(bits)]:
            _agree(spec, group_size=group, bits=bits)
            _check_rows(spec, [*ks, *vs], offset)
        case CacheKind.CHUNKED, [k, v, int(offset), int(size), int(start)]:
            _agree(spec, window=size)
            if not 0 <= start <= max(0, offset - min(offset, size)):
                raise PromptCacheError(f"cache {spec.path} holds too few rows")
            _check_rows(spec, [k, v], offset - start)
        case (
            CacheKind.ROTATING,
            [k, v, int(offset), int(keep), int(size), int(index)],
        ):
            _agree(spec, window=size, keep=keep)
            rows = _check_rows(spec, [k, v], min(offset, size))
            _check_ring(spec, rows, offset, index)
        case _:
            raise PromptCacheError(f"cache {spec.path} has an unknown form")
    if not 0 < offset <= TOKENS:
        raise PromptCacheError(f"cache {spec.path} holds an odd number of tokens")
    return offset


def _agree(spec: CacheLayout, **numbers: int) -> None:
    for name, number in numbers.items():
        if number != getattr(spec, name):
            raise PromptCacheMismatchError(
                f"cache {spec.path}: {name} is {number}, the model's is"
                f" {getattr(spec, name)}"
            )


def _check_slots(spec: CacheLayout, slots: Sequence[Tree]) -> None:
    leaves = {leaf.name: leaf for leaf in spec.leaves}
    found = [leaves.get(f"s{index}") for index in range(len(slots))]
    if len(slots) != spec.slots or not all(
        _fits(leaf, slot, rows=0) for leaf, slot in zip(found, slots, strict=True)
    ):
        raise PromptCacheMismatchError(f"cache {spec.path} is not the model's")


def _check_rows(spec: CacheLayout, arrays: Sequence[Tree], least: int) -> int:
    """Rows in a cache's buffers, which are `least` or more."""
    first = arrays[0] if arrays else None
    axis = row_axis(spec.leaves[0].shape)
    if not isinstance(first, Tensor) or len(first.shape) <= axis:
        raise PromptCacheMismatchError(f"cache {spec.path} is not the model's")
    rows = first.shape[axis]
    if len(arrays) != len(spec.leaves) or not all(
        _fits(leaf, array, rows)
        for leaf, array in zip(spec.leaves, arrays, strict=True)
    ):
        raise PromptCacheMismatchError(f"cache {spec.path} is not the model's")
    if rows < least:
        raise PromptCacheError(f"cache {spec.path} holds too few rows")
    return rows


def _fits(leaf: LeafSpec | None, found: Tree, rows: int) -> bool:
    if leaf is None or not isinstance(found, Tensor):
        return leaf is None and found is None
    shape = tuple(rows if dim == ROWS else dim for dim in leaf.shape)
    return (found.dtype, found.shape) == (leaf.dtype, shape)


def _check_ring(spec: CacheLayout, rows: int, offset: int, index: int) -> None:
    """Where the next row goes: after the last one, or within a full ring."""
    window = spec.window or 0
    if offset < rows:  # room that was never used
        fits = index == offset and rows <= window
    elif rows == window <= offset:
        fits = spec.keep < index <= rows
    else:
        fits = index == rows
    if not fits:
        raise PromptCacheError(f"cache {spec.path} contradicts itself")


def _live(file: TensorFile, kind: CacheKind, state: Tree) -> Cache:
    cls: Any = TYPE_OF_KIND[kind]
    return cls.from_state(_read(file, state))


def _read(file: TensorFile, tree: Tree) -> Any:  # noqa: ANN401 - a state of any cache
    if isinstance(tree, list):
        return [_read(file, item) for item in tree]
    if not isinstance(tree, Tensor):
        return tree
    if not tree.nbytes:
        return mx.zeros(tree.shape, DTYPES[tree.dtype])
    data = mx.array(np.frombuffer(file.read(tree), np.uint8))
    return data.view(DTYPES[tree.dtype]).reshape(tree.shape)
