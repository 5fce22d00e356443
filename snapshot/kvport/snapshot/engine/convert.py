"""Live caches that somebody else filled, checked, cut into segments and stored.

A prompt cache does not say which prompt it is of. `check_prompt` computes as much of
the prompt as tells: the first rows of layers that keep all of them, or else everything.
What is stored restores at its end alone: windows have dropped the rows that earlier
points would need, and a state is of one position.
"""

import itertools
from collections.abc import Sequence
from typing import Final

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import PointKind, Provenance
from kvport.manifest.layout import BlobClass, LayerClass, StateLayout
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import TOKEN_SIZE, encode_tokens, prefix_keys
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace, NewSegment
from kvport.snapshot.engine.comparison import ROUNDING, difference, evaluate, joined
from kvport.snapshot.engine.stops import cuts
from kvport.snapshot.errors import CapacityError, PromptCacheMismatchError
from kvport.snapshot.state import untyped
from kvport.snapshot.state.blobs import to_buffers
from kvport.snapshot.state.kinds import flatten
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import make_caches
from kvport.snapshot.state.rows import Leaves, held_rows, take

_OWNER: Final = "convert"
_FIRST: Final = 256
"""Rows that are compared: no other prompt has the same."""


def check_prompt(
    module: untyped.Model,
    kv_form: KvForm | None,
    layout: StateLayout,
    caches: Sequence[untyped.Cache],
    tokens: Sequence[int],
) -> None:
    """Check that caches hold the state of `tokens`, up to rounding.

    Without layers that keep all rows this computes the whole prompt. A limited cache
    (a layout with a head) depends on how it was filled: it is not checked.

    Args:
        module: the model.
        kv_form: of keys and values.
        layout: the model's.
        caches: live, as somebody left them.
        tokens: ids of what they are said to hold.

    Raises:
        PromptCacheMismatchError: they hold something else.
    """
    if layout.head:
        return
    by_rows = layout.has(BlobClass.KV)
    count = min(len(tokens), _FIRST) if by_rows else len(tokens)
    ours = make_caches(module, kv_form)
    evaluate(module, ours, tokens, (0, count))
    found = [
        _checked(layout, filled, held, count, by_rows=by_rows)
        for filled, held in ((ours, count), (caches, len(tokens)))
    ]
    if difference(*found) > ROUNDING:
        raise PromptCacheMismatchError(
            "the file's state is not that of this prompt; mind that"
            " mlx_lm.cache_prompt puts its prompt into the chat template"
        )


def _checked(
    layout: StateLayout,
    caches: Sequence[untyped.Cache],
    held: int,
    count: int,
    *,
    by_rows: bool,
) -> Leaves:
    (segment,), state = take(
        layout,
        caches,
        row=0,
        held=held,
        cuts=[(0, count)],
        state=not by_rows,
        windows=() if by_rows else None,
    )
    return joined(segment, state)


def store_caches(
    cache: Cache,
    namespace: Namespace,
    caches: Sequence[untyped.Cache],
    tokens: Sequence[int],
    provenance: Provenance,
) -> None:
    """Store the state of `tokens`, all of which the caches hold.

    Args:
        cache: where to.
        namespace: of the model.
        caches: live, as the model left them.
        tokens: ids, at least one.
        provenance: what is true of this state.

    Raises:
        PromptCacheMismatchError: the caches lack rows that a restore needs.
        CapacityError: there is no room.
    """
    layout, end = namespace.layout, len(tokens)
    encoded = encode_tokens(tokens)
    # Window blobs are of whole segments: these begin where the rows at hand do.
    points = {end: None, layout.head: None, end - layout.max_window: None}
    ranges = cuts(0, end, namespace.block_size, points)
    ends = [stop for _, stop in ranges]
    identity = namespace.identity.digest
    keys = prefix_keys(identity, namespace.block_size, encoded, ends)
    coverage = WindowCoverage.of(layout)
    chain = cache.chain(namespace, ROOT_NODE, _OWNER)
    try:
        for (start, stop), key in zip(ranges, keys, strict=True):
            windows = coverage.needs(start, stop, [end])
            if windows:
                _check_windows(layout, caches, start, stop, held=end)
            chain.append(
                NewSegment(
                    start=start,
                    end=stop,
                    key=key,
                    tokens=encoded[start * TOKEN_SIZE : stop * TOKEN_SIZE],
                    kinds=frozenset({PointKind.PROMPT} if stop == end else ()),
                    blobs=_blobs(layout, caches, (start, stop), end, windows=windows),
                    provenance=provenance,
                )
            )
        cache.flush()
        if chain.broken is not None:
            raise CapacityError("there is no room to cut the state into segments")
    finally:
        chain.close()


def _blobs(
    layout: StateLayout,
    caches: Sequence[untyped.Cache],
    cut: tuple[int, int],
    held: int,
    *,
    windows: bool,
) -> dict[BlobClass, list[memoryview]]:
    start, end = cut
    (segment,), state = take(
        layout, caches, row=0, held=held, cuts=[cut], state=end == held
    )
    leaves = dict(segment) | ({} if state is None else {BlobClass.STATE: state})
    if end == held and layout.has(BlobClass.STATE) and state is None:
        raise PromptCacheMismatchError("the state has no restorable form yet")
    if not windows:
        leaves.pop(BlobClass.WINDOW, None)  # rows that are gone
    return {
        blob_class: to_buffers(layout, blob_class, end - start, found)
        for blob_class, found in leaves.items()
    }


def _check_windows(
    layout: StateLayout,
    caches: Sequence[untyped.Cache],
    start: int,
    end: int,
    *,
    held: int,
) -> None:
    for spec, (path, cache) in zip(layout.caches, flatten(caches), strict=True):
        if spec.layer_class is LayerClass.WINDOWED:
            here = held_rows(spec, cache, held)
            wanted = itertools.chain(*spec.rows(start, end))
            if not all(any(row in rows for rows in here) for row in wanted):
                # As where windows are of several sizes: the smaller has dropped rows
                # that its blob of a segment for the larger would have.
                raise PromptCacheMismatchError(
                    f"cache {path} has dropped rows that an artifact would carry"
                )
