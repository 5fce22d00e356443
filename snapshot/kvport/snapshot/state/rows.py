"""New rows and states out of a live cache, in canonical form.

Canonical: rows in time order, cut to length, one sequence, contiguous. Only rows that
were not taken before are copied, at the step at which they are asked for: the live
object goes on changing (mlx-lm rotates windows and moves batches in place).

Where rows are: the row of position p is at `tail - (held - p)` in solo and batched KV
caches alike, since batches are padded on the left; in a rotating cache that index
counts modulo the buffer's length. `tail` is where the next row would go. The first
`keep` rows of a rotating cache stand still; the ring is what comes after them.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from kvport.manifest.layout import BlobClass, CacheKind, CacheLayout, StateLayout
from kvport.snapshot.state.kinds import flatten, leaves
from kvport.snapshot.state.untyped import Cache, ring_index

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
    windows: Container[tuple[int, int]] | None = None,
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
        windows: segments whose windowed rows are wanted; None for all.

    Returns:
        For each segment the leaves of its `kv` and `window` blobs; the leaves of the
        boundary, or None, also where a state does not have its form yet.
    """
    segments: list[dict[BlobClass, Leaves]] = [
        {
            c: {}
            for c in layout.blob_classes
            if c is BlobClass.KV
            or (c is BlobClass.WINDOW and (windows is None or cut in windows))
        }
        for cut in cuts
    ]
    boundary: Leaves | None = {} if state and layout.has(BlobClass.STATE) else None
    copies: list[mx.array] = []
    for c, (_, cache) in enumerate(flatten(caches)):
        spec = layout.caches[c]
        if spec.kind is CacheKind.ARRAYS:
            if boundary is not None and _settled(spec, cache):
                for j, array in enumerate(leaves(cache).values()):
                    boundary[c, j] = mx.contiguous(array[row : row + 1])
            else:
                boundary = None
            continue
        blob = BlobClass.KV if spec.window is None else BlobClass.WINDOW
        for segment, (start, end) in zip(segments, cuts, strict=True):
            if blob not in segment:
                continue
            wanted = spec.rows(start, end)
            for j, array in enumerate(_rows(spec, cache, row, held, wanted)):
                segment[blob][c, j] = array
    for group in (*(s[b] for s in segments for b in s), boundary or {}):
        copies.extend(group.values())
    mx.eval(copies)
    return list(segments), boundary


def held_rows(spec: CacheLayout, cache: Cache, held: int) -> tuple[range, range]:
    """Positions of the rows that a solo cache of rows has, in two ranges."""
    first = leaves(cache)
    length = next(iter(first.values())).shape[2]
    if isinstance(cache, ChunkedKVCache):
        return range(0), range(int(cache.start_position), held)
    ring = min(length, held) - spec.keep
    return range(min(spec.keep, held)), range(held - ring, held)


def _rows(
    spec: CacheLayout,
    cache: Cache,
    row: int,
    held: int,
    wanted: tuple[range, range],
) -> Iterator[mx.array]:
    tail = _tail(cache)
    for array in leaves(cache).values():
        length = array.shape[2]
        parts: list[tuple[int, int]] = []
        for rows in wanted:
            parts.append((rows.start, min(rows.stop, spec.keep)))
            start = max(rows.start, spec.keep)
            if start < rows.stop:
                ring = length - spec.keep
                first = spec.keep + (tail - held + start - spec.keep) % ring
                last = first + rows.stop - start
                parts.append((first, min(last, length)))
                # The ring may wrap inside the segment.
                parts.append((spec.keep, spec.keep + last - length))
        found = [array[row : row + 1, :, a:b] for a, b in parts if a < b]
        yield mx.contiguous(found[0] if len(found) == 1 else mx.concatenate(found, 2))


def _settled(spec: CacheLayout, cache: Cache) -> bool:
    """Whether a whole layer's state has its form: some grow over the first tokens."""
    found = leaves(cache)
    return [*found] == [leaf.name for leaf in spec.leaves] and all(
        found[leaf.name].shape[1:] == leaf.shape[1:] for leaf in spec.leaves
    )


def _tail(cache: Cache) -> int:
    if isinstance(cache, ChunkedKVCache):
        return int(cache.offset - cache.start_position)
    if isinstance(cache, (KVCache, QuantizedKVCache)):
        return int(cache.offset)
    return ring_index(cache)
