"""Names for objects of mlx and mlx-lm that have no types, or none that say enough."""

from typing import Any, TypeAlias

Cache: TypeAlias = Any
"""A cache object of `mlx_lm.models.cache`, solo or batched."""

Model: TypeAlias = Any
"""A language model of `mlx_lm.models`."""

Tokenizer: TypeAlias = Any
"""mlx-lm's wrapper of a tokenizer."""

Detokenizer: TypeAlias = Any
"""A tokenizer's streaming detokenizer."""

Ids: TypeAlias = Any
"""An `mlx.core.array` of token ids, shape [n]; its own `tolist` may be any nesting."""


def token_ids(array: Ids) -> list[int]:
    """Token ids as numbers; evaluates the array."""
    ids: list[int] = array.tolist()
    return ids


def ring_index(cache: Cache) -> int:
    """Where the next row of a rotating cache goes; mlx-lm has no public name for it."""
    return int(cache._idx)  # noqa: SLF001 - see above


def set_ring_index(cache: Cache, index: int) -> None:
    """Have the next row of a rotating cache go there."""
    cache._idx = index  # noqa: SLF001 - see above
