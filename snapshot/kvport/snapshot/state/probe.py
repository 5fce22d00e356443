"""The layout of a loaded model, proved by a round trip; refusal by name.

A model's caches are watched over a few tokens: which leaves grow with rows, which keep
their shape. Then state is captured, restored and continued: a model that fails this has
state that we would lose, and is refused. What cannot be merged into a batch and
extracted again runs alone.
"""

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.blobs import Assembly, to_buffers
from kvport.snapshot.state.kinds import describe, flatten
from kvport.snapshot.state.rows import take
from kvport.snapshot.state.untyped import Cache, Model

_PROBE = 5  # tokens; small, and not a power of two


@attrs.frozen
class Quantisation:
    """Of keys and values: bits of a value, and values that share a scale."""

    bits: int
    group_size: int


@attrs.frozen
class Probed:
    """What a probe found.

    Attributes:
        layout: the model's layout.
        alone: why its sequences run one at a time, None if they can be batched.
    """

    layout: StateLayout
    alone: str | None


def make_caches(model: Model, quantisation: Quantisation | None) -> list[Cache]:
    """Empty caches of a model.

    Args:
        model: the language model.
        quantisation: of keys and values, from token 0 on; None for the model's own
            representation.

    Raises:
        UnsupportedModelError: a cache that cannot be quantised.
    """
    caches: list[Cache] = make_prompt_cache(model)
    if quantisation is None:
        return caches
    for index, cache in enumerate(caches):
        if type(cache) is not KVCache:
            name = f"cache {index} ({type(cache).__name__})"
            raise UnsupportedModelError(f"{name} cannot be quantised")
    return [
        QuantizedKVCache(quantisation.group_size, quantisation.bits) for _ in caches
    ]


def probe(model: Model, quantisation: Quantisation | None = None) -> Probed:
    """Derive the model's layout and prove it by a round trip on a few tokens.

    Raises:
        UnsupportedModelError: the model keeps state of a kind that is not carried.
    """
    caches = make_caches(model, quantisation)
    _run(model, caches, 2)
    layout = _layout(caches)
    _run(model, caches, _PROBE - 2)
    if _layout(caches) != layout:
        raise UnsupportedModelError("a cache changes its form from token to token")
    restored = _round_trip(layout, caches)
    live, again = _run(model, caches, 1), _run(model, restored, 1)
    if not mx.array_equal(live, again).item():
        raise UnsupportedModelError("the model has state beside its caches")
    return Probed(layout, _why_alone(layout, caches))


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


def _why_alone(layout: StateLayout, caches: list[Cache]) -> str | None:
    """Merge two copies, and compare what is extracted with what went in."""
    for path, cache in flatten(caches):
        if not hasattr(cache, "merge"):
            return f"cache {path} ({type(cache).__name__}) cannot be batched"
    try:
        same = _survives_merge(layout, caches)
    except Exception as error:  # noqa: BLE001 - whatever mlx-lm meets in a strange cache
        return f"merging its caches fails ({type(error).__name__})"
    return None if same else "a batch does not hold what was merged into it"


def _survives_merge(layout: StateLayout, caches: list[Cache]) -> bool:
    held = _PROBE + 1
    merged = [cache.merge([cache, cache]) for cache in caches]
    # Extraction is how mlx-lm hands a finished sequence out.
    for each in (
        merged,
        [c.extract(0) for c in merged],
        [c.extract(1) for c in merged],
    ):
        (alone,), state = take(
            layout, caches, row=0, held=held, cuts=[(0, held)], state=True
        )
        (batch,), both = take(
            layout, each, row=0, held=held, cuts=[(0, held)], state=True
        )
        pairs = [
            (leaf, batch[blob_class][index])
            for blob_class, group in alone.items()
            for index, leaf in group.items()
        ]
        pairs += [(leaf, (both or {})[i]) for i, leaf in (state or {}).items()]
        if not all(mx.array_equal(a, b).item() for a, b in pairs):
            return False
    return True
