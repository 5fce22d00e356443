"""Computing a state again, and how far it is from one that should be the same.

Another machine or version rounds otherwise; another prompt, model or computation gives
other values. Between the two lies `ROUNDING`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, cast

import mlx.core as mx

from kvport.manifest.layout import BlobClass
from kvport.snapshot.state import untyped
from kvport.snapshot.state.rows import Leaves

_CHUNK: Final = 512

ROUNDING: Final = 0.05
"""Of the largest value of a leaf."""


def evaluate(
    module: untyped.Model,
    caches: Sequence[untyped.Cache],
    tokens: Sequence[int],
    part: tuple[int, int],
) -> None:
    """Compute tokens [start, end) into caches that hold the ones before.

    As prefill cuts them: at absolute multiples of a chunk.
    """
    at, end = part
    while at < end:
        stop = min(at - at % _CHUNK + _CHUNK, end)
        module(mx.array([list(tokens[at:stop])]), cache=caches)
        mx.eval([cache.state for cache in caches])
        at = stop


def joined(rows: Mapping[BlobClass, Leaves], state: Leaves | None) -> Leaves:
    """A segment's leaves of all classes, and a boundary's, if there is one."""
    return {i: leaf for found in rows.values() for i, leaf in found.items()} | (
        state or {}
    )


def difference(ours: Leaves, theirs: Leaves) -> float:
    """The largest difference, relative to the largest value of its leaf.

    Leaves that hold no floats (packed weights of quantised rows) are not compared:
    their scales are. A leaf that is missing, of another shape, or not finite is
    infinitely far.
    """
    if ours.keys() != theirs.keys():
        return math.inf
    worst = 0.0
    for index, mine in ours.items():
        other = theirs[index]
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return math.inf
        if not mx.issubdtype(mine.dtype, mx.floating) or not mine.size:
            continue
        apart = _relative(mine.astype(mx.float32), other.astype(mx.float32))
        worst = max(worst, math.inf if math.isnan(apart) else apart)
    return worst


def _relative(mine: mx.array, other: mx.array) -> float:
    largest = mx.maximum(mx.abs(mine).max(), mx.abs(other).max())
    apart = mx.abs(mine - other).max()
    # Equal zeros are not apart.
    return cast("float", mx.where(largest == 0, apart, apart / largest).item())
