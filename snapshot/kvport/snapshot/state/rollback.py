"""Step a model's solo caches back, so that rejected drafts leave no trace.

Two ways, by what the layers can do:

- `cut` drops the last rows, in place, at no cost. Only for models without whole layers,
  and only rows of one evaluation: that keeps as many rows before its own as windowed
  layers need for its first token.
- `Snapshot` brings all layers back to where they were when it was taken, whatever was
  evaluated since. Whole layers know no other way.

mlx-lm's own `trim` is right for rows that are appended. In a rotating cache it moves an
index only: the rejected rows stay behind it, pass for the oldest ones, and are attended
to; once the window is full mlx-lm does not trim at all, and keeps them.

After either, `rows.take` at the true count gives canonical rows: a rotating cache holds
the last min(position, window) rows at least.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from kvport.manifest.layout import CLASS_OF_KIND, CacheKind, LayerClass
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.kinds import KIND_OF_TYPE, flatten
from kvport.snapshot.state.untyped import Cache, ring_index, set_ring_index


def can_cut(caches: Sequence[Cache]) -> bool:
    """Whether the last rows can be cut; otherwise only a `Snapshot` goes back.

    Raises:
        UnsupportedModelError: a cache of a kind that is not known here.
    """
    for path, cache in flatten(caches):
        if type(cache) not in KIND_OF_TYPE:
            name = f"cache {path} ({type(cache).__name__})"
            raise UnsupportedModelError(f"{name} cannot be stepped back")
    return all(_class(cache) is not LayerClass.WHOLE for _, cache in flatten(caches))


def cut(caches: Sequence[Cache], count: int) -> None:
    """Drop the last `count` rows of every layer.

    Args:
        caches: solo caches without whole layers.
        count: tokens to forget; fewer than the last evaluation had. Earlier ones
            cannot be: windowed layers would lack rows.
    """
    if not count:
        return
    for _, cache in flatten(caches):
        if isinstance(cache, RotatingKVCache):
            # An evaluation of several tokens leaves the rows in time order, the last
            # at the end.
            if cache.keys is not None:
                cache.keys = cache.keys[..., :-count, :]
                cache.values = cache.values[..., :-count, :]
                cache.offset -= count
                set_ring_index(cache, cache.keys.shape[2])
        else:
            cache.trim(count)


class Snapshot:
    """Where caches stood; no array is copied, no buffer of full rows is kept alive."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._ways = [_way_back(cache) for _, cache in flatten(caches)]

    def restore(self) -> None:
        """Bring the caches back; a snapshot serves once."""
        for way in self._ways:
            way()


def _way_back(cache: Cache) -> Callable[[], None]:
    match cache:
        case ArraysCache():
            return _set(cache, cache=[_alias(array) for array in cache.cache])
        case RotatingKVCache():
            return _set(
                cache,
                keys=_alias(cache.keys),
                values=_alias(cache.values),
                offset=cache.offset,
                _idx=ring_index(cache),
            )
        case ChunkedKVCache():
            # Rows are only appended, but those at the front go: into new arrays.
            return _set(
                cache,
                keys=cache.keys,
                values=cache.values,
                offset=cache.offset,
                start_position=cache.start_position,
            )
        case _:
            return _set(cache, offset=cache.offset)


def _set(cache: Cache, /, **attributes: object) -> Callable[[], None]:
    def restore() -> None:
        for name, value in attributes.items():
            setattr(cache, name, value)

    return restore


def _alias(array: mx.array | None) -> mx.array | None:
    """The same memory in another array object: assignment in place does not reach it.

    mlx assigns by giving the object that stands on the left a new array; a second
    reference to that object would change with it.
    """
    return None if array is None else array[...]


def _class(cache: Cache) -> LayerClass:
    kind: CacheKind = KIND_OF_TYPE[type(cache)]
    return CLASS_OF_KIND[kind]
