"""The layout of a loaded model, proved by a round trip; refusal by name.

A model's caches are watched over a few tokens: which leaves grow with rows, which keep
their shape. Then state is captured, restored, merged into a batch and extracted again:
a model that fails this has state that we would lose, and is refused.
"""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvport.manifest.layout import BlobClass, CacheKind, StateLayout
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.blobs import Assembly, to_buffers
from kvport.snapshot.state.kinds import describe, flatten
from kvport.snapshot.state.rows import take
from kvport.snapshot.state.untyped import Cache, Model

_PROBE = 5  # tokens; small, and not a power of two


def batchable(model: Model) -> None:
    """Check that mlx-lm can batch the model's caches.

    Raises:
        UnsupportedModelError: naming the first cache that cannot be merged.
    """
    for path, cache in flatten(make_prompt_cache(model)):
        if not hasattr(cache, "merge"):
            name = type(cache).__name__
            raise UnsupportedModelError(f"cache {path} ({name}) cannot be batched")


def probe(model: Model) -> StateLayout:
    """Derive the model's layout and prove it by a round trip on a few tokens.

    Raises:
        UnsupportedModelError: the model keeps state of a kind that is not carried.
    """
    caches = make_prompt_cache(model)
    _run(model, caches, 2)
    layout = _layout(caches)
    _run(model, caches, _PROBE - 2)
    if _layout(caches) != layout:
        raise UnsupportedModelError("a cache changes its form from token to token")
    restored = _round_trip(layout, caches)
    live, again = _run(model, caches, 1), _run(model, restored, 1)
    if not mx.array_equal(live, again).item():
        raise UnsupportedModelError("the model has state beside its caches")
    _merge(layout, caches)
    return layout


def _run(model: Model, caches: list[Cache], count: int) -> mx.array:
    logits: mx.array = model(mx.arange(1, count + 1)[None], cache=caches)[:, -1]
    mx.eval(logits, [c.state for c in caches])
    return logits


def _layout(caches: list[Cache]) -> StateLayout:
    return StateLayout(tuple(describe(path, cache) for path, cache in flatten(caches)))


def _round_trip(layout: StateLayout, caches: list[Cache]) -> list[Cache]:
    cuts = [(0, _PROBE)]
    (segment,), state = take(layout, caches, row=0, held=_PROBE, cuts=cuts, state=True)
    leaves = dict(segment) | ({BlobClass.STATE: state} if state else {})
    assembly = Assembly(layout, _PROBE)
    for blob_class, found in leaves.items():
        buffers = to_buffers(layout, blob_class, _PROBE, found)
        assembly.add(blob_class, 0, _PROBE, memoryview(b"".join(buffers)))
    return assembly.caches()


def _merge(layout: StateLayout, caches: list[Cache]) -> None:
    """Merge two copies, and compare what is extracted with what went in."""
    held = _PROBE + 1
    merged = [cache.merge([cache, cache]) for cache in caches]
    for row in (0, 1):
        (alone,), state = take(
            layout, caches, row=0, held=held, cuts=[(0, held)], state=True
        )
        (batch,), both = take(
            layout, merged, row=row, held=held, cuts=[(0, held)], state=True
        )
        pairs = [
            (leaf, batch[blob_class][index])
            for blob_class, group in alone.items()
            for index, leaf in group.items()
        ]
        pairs += [(leaf, (both or {})[i]) for i, leaf in (state or {}).items()]
        if not all(mx.array_equal(a, b).item() for a, b in pairs):
            raise UnsupportedModelError("a batch does not hold what was merged into it")


def kinds_of(layout: StateLayout) -> dict[CacheKind, int]:
    """How many cache objects of each kind a layout has."""
    counts: dict[CacheKind, int] = {}
    for cache in layout.caches:
        counts[cache.kind] = counts.get(cache.kind, 0) + 1
    return counts
