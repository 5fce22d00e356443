"""Hot: the origin's own continuation, from its live caches in canonical form."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.engine.lanes import Lanes
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.steps import Live, NewSequence
from kvport.snapshot.engine.stops import plan
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.state.kinds import rebuild
from kvport.snapshot.state.rows import take

Logprobs = NDArray[np.float32]
Canonical = list[list[mx.array]]
"""A state in canonical form: for each cache of the layout its leaves."""


def canonical(layout: StateLayout, live: Live) -> Canonical:
    """All that live caches hold of a sequence, copied."""
    held = live.held
    (segment,), state = take(
        layout, live.caches, row=live.row, held=held, cuts=[(0, held)], state=True
    )
    leaves = {**segment.get(BlobClass.KV, {}), **segment.get(BlobClass.WINDOW, {})}
    leaves |= state or {}
    return [
        [leaves[c, j] for j in range(len(cache.leaves))]
        for c, cache in enumerate(layout.caches)
    ]


def continue_hot(
    model: Model,
    layout: StateLayout,
    tuning: Tuning,
    *,
    prompt: Sequence[int],
    at: int,
    state: Canonical,
    steps: int,
) -> Logprobs:
    """Go on from canonical state, alone; in the engine's thread.

    Args:
        model: what to run.
        layout: the model's layout.
        tuning: of the engine that restores.
        prompt: the whole prompt.
        at: tokens of the prompt that the state holds.
        state: left as it is.
        steps: greedy steps after the prompt's last token.

    Returns:
        Log-probabilities, shape [1 + steps, vocabulary].
    """
    # Array objects of its own: mlx-lm writes rows into those that it is given.
    arrays = [[mx.array(leaf) for leaf in leaves] for leaves in state]
    way = plan(
        len(prompt), layout=layout, chunk=tuning.chunk, stride=tuning.stride, fork=None
    )
    lanes = Lanes(model, tuning.chunk, tuning.kv_form, None)
    new = NewSequence(
        segments=way.segments(prompt, at),
        prefix=prompt[:at],
        caches=rebuild(layout, arrays, at),
        max_tokens=steps + 1,
    )
    lanes.insert(new)
    rows: list[Any] = []
    while len(rows) <= steps:
        rows += [np.array(t.logprobs.astype(mx.float32)) for t in lanes.step().tokens]
    lanes.close()
    return np.stack(rows)
