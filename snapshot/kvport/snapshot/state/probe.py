"""The layout of a loaded model, proved by a round trip; refusal by name.

A model's caches are watched over a few tokens: which leaves grow with rows, which keep
their shape, if not from the first token on then soon. Then state is captured, restored
and continued: a model that fails this has state that we would lose, and is refused.
What cannot be merged into a batch and extracted again runs alone.
"""

from collections.abc import Callable
from typing import Final

import attrs
import mlx.core as mx
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.blobs import Assembly, to_buffers
from kvport.snapshot.state.kinds import describe, flatten
from kvport.snapshot.state.kv_form import KEEP, KvForm, Quantisation
from kvport.snapshot.state.rows import take
from kvport.snapshot.state.untyped import Cache, Model

_FIRST: Final = 2
_MORE: Final = 3
_SETTLED: Final = 64
"""Tokens after which a state must have its form; n-grams need n - 1."""
_UNEQUAL: Final = (60, 20)
"""Lengths of two sequences in one batch."""
_FEW: Final = 7
"""Different token ids; every vocabulary has as many."""
_ROUNDING: Final = 0.05
"""Of the largest value; bfloat16 rounds to some percent over many layers."""


@attrs.frozen
class Probed:
    """What a probe found.

    Attributes:
        layout: the model's layout.
        alone: why its sequences run one at a time, None if they can be batched.
    """

    layout: StateLayout
    alone: str | None


def make_caches(model: Model, kv_form: KvForm | None) -> list[Cache]:
    """Empty caches of a model.

    Args:
        model: the language model.
        kv_form: of keys and values; None for the model's own.

    Raises:
        UnsupportedModelError: a cache that cannot be of this form.
    """
    caches: list[Cache] = make_prompt_cache(model)
    if kv_form is None:
        return caches
    for index, cache in enumerate(caches):
        if type(cache) is not KVCache:
            name = f"cache {index} ({type(cache).__name__})"
            done = "quantised" if isinstance(kv_form, Quantisation) else "limited"
            raise UnsupportedModelError(f"{name} cannot be {done}")
    if isinstance(kv_form, Quantisation):
        return [QuantizedKVCache(kv_form.group_size, kv_form.bits) for _ in caches]
    return [RotatingKVCache(kv_form.rows, KEEP) for _ in caches]


def probe(model: Model, kv_form: KvForm | None = None) -> Probed:
    """Derive the model's layout and prove it by a round trip on a few tokens.

    Raises:
        UnsupportedModelError: the model keeps state of a kind that is not carried.
    """
    caches = make_caches(model, kv_form)
    try:
        _run(model, caches, _FIRST)
    except ValueError as error:
        if not isinstance(kv_form, Quantisation):
            raise
        # mlx quantises rows in whole groups only.
        groups = f"groups of {kv_form.group_size}"
        raise UnsupportedModelError(f"its rows are not whole {groups}") from error
    held, layouts = _FIRST, [_layout(caches)]
    for count in (_MORE, _SETTLED, _MORE):
        _run(model, caches, count)
        held += count
        layouts.append(_layout(caches))
        if layouts[-1] == layouts[-2]:
            break
    else:
        raise UnsupportedModelError("a cache changes its form from token to token")
    layout = layouts[-1]
    restored = _round_trip(layout, caches, held)
    live, again = _run(model, caches, 1), _run(model, restored, 1)
    if not mx.array_equal(live, again).item():
        raise UnsupportedModelError("the model has state beside its caches")
    if layout != layouts[0]:
        return Probed(layout, "its state has another form after few tokens")
    return Probed(layout, _why_alone(model, lambda: make_caches(model, kv_form)))


def _run(model: Model, caches: list[Cache], count: int) -> mx.array:
    tokens = mx.arange(count) % _FEW + 1
    logits: mx.array = model(tokens[None], cache=caches)[:, -1]
    mx.eval(logits, [c.state for c in caches])
    return logits


def _layout(caches: list[Cache]) -> StateLayout:
    return StateLayout(tuple(describe(path, cache) for path, cache in flatten(caches)))


def _round_trip(layout: StateLayout, caches: list[Cache], held: int) -> list[Cache]:
    cuts = [(0, held)]
    (segment,), state = take(layout, caches, row=0, held=held, cuts=cuts, state=True)
    leaves = dict(segment) | ({BlobClass.STATE: state} if state else {})
    assembly = Assembly(layout, held)
    for blob_class, found in leaves.items():
        buffers = to_buffers(layout, blob_class, held, found)
        assembly.add(blob_class, 0, held, memoryview(b"".join(buffers)))
    return assembly.caches()


def _why_alone(model: Model, fresh: Callable[[], list[Cache]]) -> str | None:
    """Whether two sequences of unequal length can share a batch; if not, why.

    Equal lengths need no padding, and would not show a model that masks it wrongly
    (gemma2 in mlx-lm 0.32.2): replies would be wrong, and so would captured state.
    """
    alone = [fresh(), fresh()]
    for caches, length in zip(alone, _UNEQUAL, strict=True):
        _run(model, caches, length)
    for path, cache in flatten(alone[0]):
        if not hasattr(cache, "merge"):
            return f"cache {path} ({type(cache).__name__}) cannot be batched"
        if type(cache) is RotatingKVCache and cache.keep:
            # mlx-lm's batches forget what is kept, and say nothing.
            return f"cache {path} keeps its first {cache.keep} rows"
    try:
        merged = [a.merge([a, b]) for a, b in zip(*alone, strict=True)]
        together = model(mx.array([[1], [1]]), cache=merged)[:, -1]
        extracted = [[cache.extract(row) for cache in merged] for row in (0, 1)]
    except Exception as error:  # noqa: BLE001 - whatever mlx-lm meets in a strange cache
        return f"batching its caches fails ({type(error).__name__})"
    for row, caches in enumerate(alone):
        expected = model(mx.array([[1]]), cache=caches)[0, -1]
        if not _close(together[row], expected):
            return "a batch of unequal lengths gives other replies"
        held = _UNEQUAL[row] + 1
        if not _alike(_layout(caches), caches, extracted[row], held):
            return "a batch does not hold what was merged into it"
    return None


def _close(left: mx.array, right: mx.array) -> bool:
    """Up to rounding, in any dtype; a wrong mask is off by much more."""
    allowed = _ROUNDING * mx.maximum(mx.abs(right).max(), 1)
    return bool(mx.all(mx.abs(left - right) <= allowed).item())


def _alike(
    layout: StateLayout, left: list[Cache], right: list[Cache], held: int
) -> bool:
    cuts = [(0, held)]
    taken = [
        take(layout, caches, row=0, held=held, cuts=cuts, state=True)
        for caches in (left, right)
    ]
    groups = [
        [*segments[0].values(), *([state] if state else [])]
        for segments, state in taken
    ]
    return all(
        _close(ours[index], theirs[index])
        for ours, theirs in zip(*groups, strict=True)
        for index in ours
        if ours[index].size
    )
