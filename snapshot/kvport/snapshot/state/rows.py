"""New rows and states out of a live cache, in canonical form.

Canonical: rows in time order, cut to length, one sequence, contiguous. Only rows that
were not taken before are copied, at the step at which they are asked for: the live
object goes on changing (mlx-lm rotates windows and moves batches in place).

Where rows are: the row of position p is at `tail - (held - p)` in solo and batched KV
caches alike, since batches are padded on the left; in a rotating cache that index
counts modulo the buffer's length. `tail` is where the next row would go.
"""

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from kvport.manifest.layout import BlobClass, CacheKind, StateLayout
from kvport.snapshot.state.kinds import flatten, leaves
from kvport.snapshot.state.untyped import Cache

Leaves = dict[tuple[int, int], mx.array]
"""Arrays by (index of the cache in the layout, index of the leaf)."""


def take(
    layout: StateLayout,
    caches: Sequence[Cache],
    *,
    row: int,
    held: int,
    cuts: Sequence[tuple[int, int]],
    state: bool,
) -> tuple[list[Mapping[BlobClass, Leaves]], Leaves | None]:
    """Copy segments, and the boundary's state if asked for, out of live caches.

    All arrays are evaluated when this returns, so that another thread may read them.

    Args:
        layout: the model's layout.
        caches: live caches, solo or batched.
        row: the sequence's index in the batch; 0 for solo caches.
        held: tokens that the caches hold of this sequence.
        cuts: segments [start, end), ascending, end <= held. Windowed rows of a segment
            are there only if no more than `window` - 1 + chunk rows came after it.
        state: whether to take the whole layers' state; it is the state at `held`.

    Returns:
        For each segment the leaves of its `kv` and `window` blobs; the leaves of the
        boundary, or None.
    """
    segments: list[dict[BlobClass, Leaves]] = [
        {c: {} for c in layout.blob_classes if c is not BlobClass.STATE} for _ in cuts
    ]
    boundary: Leaves | None = {} if state and layout.has(BlobClass.STATE) else None
    copies: list[mx.array] = []
    for c, (_, cache) in enumerate(flatten(caches)):
        spec = layout.caches[c]
        if spec.kind is CacheKind.ARRAYS:
            if boundary is not None:
                for j, array in enumerate(leaves(cache).values()):
                    boundary[c, j] = mx.contiguous(array[row : row + 1])
            continue
        blob = BlobClass.KV if spec.window is None else BlobClass.WINDOW
        for segment, (start, end) in zip(segments, cuts, strict=True):
            first = max(start, end - (spec.window or end))
            for j, array in enumerate(_rows(cache, row, held, first, end)):
                segment[blob][c, j] = array
    for group in (*(s[b] for s in segments for b in s), boundary or {}):
        copies.extend(group.values())
    mx.eval(copies)
    return list(segments), boundary


def _rows(
    cache: Cache,
    row: int,
    held: int,
    start: int,
    end: int,
) -> Iterator[mx.array]:
    tail = _tail(cache)
    for array in leaves(cache).values():
        length = array.shape[2]
        first = (tail - (held - start)) % length
        last = first + end - start
        rows = array[row : row + 1, :, first : min(last, length)]
        if last > length:  # the ring wraps inside the segment
            wrapped = array[row : row + 1, :, : last - length]
            rows = mx.concatenate([rows, wrapped], axis=2)
        yield mx.contiguous(rows)


def _tail(cache: Cache) -> int:
    if isinstance(cache, ChunkedKVCache):
        return int(cache.offset - cache.start_position)
    if isinstance(cache, (KVCache, QuantizedKVCache)):
        return int(cache.offset)
    return int(cache._idx)  # noqa: SLF001 - no public name
