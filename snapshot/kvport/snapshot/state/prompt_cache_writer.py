"""Prompt cache files of mlx-lm, written: what its own `load_prompt_cache` reads."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, BinaryIO

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    save_prompt_cache,
)

from kvport.snapshot.errors import PromptCacheError
from kvport.snapshot.state.untyped import Cache, ring_index


class Form(StrEnum):
    """Which versions of mlx-lm read a file."""

    OLDER = "0.31"
    """Numbers in the metadata; up to 0.31."""
    NEWER = "0.32"
    """Numbers among the tensors; since 0.32."""


def write_prompt_cache(
    file: BinaryIO, caches: Sequence[Cache], form: Form, metadata: Mapping[str, str]
) -> None:
    """Write caches as mlx-lm does.

    Args:
        file: where to.
        caches: evaluated, in canonical form.
        form: which of the two.
        metadata: texts beside the state, for whoever loads it.

    Raises:
        PromptCacheError: the older form cannot hold these caches.
        OSError: the file cannot be written.
    """
    if form is Form.NEWER:
        save_prompt_cache(file, list(caches), dict(metadata))
        return
    states = tree_flatten([_state(cache) for cache in caches])
    classes = [type(cache).__name__ for cache in caches]
    beside = [[_numbers(cache) for cache in caches], dict(metadata), classes]
    mx.save_safetensors(file, dict(states), dict(tree_flatten(beside)))


def _state(cache: Cache) -> list[Any]:
    if isinstance(cache, CacheList):
        return [_state(member) for member in cache.caches]
    if isinstance(cache, ArraysCache):
        if any(array is None for array in cache.cache):
            raise PromptCacheError("the older form has no arrays that are not set")
        return list(cache.cache)
    if isinstance(cache, ChunkedKVCache) and cache.start_position:
        raise PromptCacheError("the older form does not say where chunks begin")
    return [cache.keys, cache.values]


def _numbers(cache: Cache) -> Any:  # noqa: ANN401 - texts and lists of them
    if isinstance(cache, CacheList):
        names = [type(member).__name__ for member in cache.caches]
        return [names, [_numbers(member) for member in cache.caches]]
    found: tuple[int, ...] = ()
    if isinstance(cache, RotatingKVCache):
        found = (cache.keep, cache.max_size, cache.offset, ring_index(cache))
    elif isinstance(cache, QuantizedKVCache):
        found = (cache.offset, cache.group_size, cache.bits)
    elif isinstance(cache, ChunkedKVCache):
        found = (cache.chunk_size, cache.start_position)
    return [str(number) for number in found] or ""
