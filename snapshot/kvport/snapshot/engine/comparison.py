"""How far two states are apart that should be the same.

Another machine or version rounds otherwise; another prompt, model or computation gives
other values. Between the two lies `ROUNDING`.
"""

import math
from typing import Final, cast

import mlx.core as mx

from kvport.snapshot.state.rows import Leaves

ROUNDING: Final = 0.05
"""Of the largest value of a leaf."""


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
