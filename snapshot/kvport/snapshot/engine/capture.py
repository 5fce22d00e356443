"""Capture: new rows of one running request, from its live caches to its chain.

A `Recorder` follows one request. It is told where the live caches are after each step
and copies what is new, right then: segments cut at block ends and points, the whole
layers' state where the position is a point. What it appends is labelled with its
lineage: `cold` as long as the prefix was prefilled alone and every stop so far was a
chunk multiple, `derived` from then on.

A segment's window rows are stored only if a point within the window needs them. While
a reply goes on nobody knows where it will end, so the newest segments wait in memory
until they are out of reach of the next point. What still waits when the reply ends is
its tail: stored lazily, since the next turn usually supersedes it (tails.py).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import KeyId, Lineage, Numerics, PointKind, Provenance
from kvport.manifest.layout import BlobClass
from kvport.manifest.tokens import TOKEN_SIZE, KeyChain, encode_tokens
from kvport.snapshot.cache.cache import Chain
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.engine.steps import Live
from kvport.snapshot.engine.stops import Plan, cuts
from kvport.snapshot.engine.taken import NO_POINT, Base, Taken
from kvport.snapshot.state.rows import Leaves, take


class Recorder:
    """One request's capture; every call in the engine's thread."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        chain: Chain,
        prompt: Sequence[int],
        plan: Plan,
        base: Base,
        restored: int,
        local: KeyId,
        numerics: Numerics,
        stride: int,
        fork: int | None,
        waiting: Iterable[Taken] = (),
    ) -> None:
        """Begin where `base` ends; `waiting` are the last segments before that.

        The points of these are those of the new plan. Where the next turn is known to
        part before the reply, at `fork`, the reply gets no stride points.
        """
        self._layout = namespace.layout
        self._block = namespace.block_size
        self.chain: Final = chain
        self._done = base.end
        self._cold = base.cold and restored % numerics.chunk == 0
        self._origins = base.origins | {local}
        self._numerics = numerics
        self._stride = stride
        self._tokens = bytearray(encode_tokens(prompt))
        self._keys = KeyChain(namespace.identity.digest, namespace.block_size)
        self._points = dict(plan.points)
        # Up to here all points are known.
        self._horizon = len(prompt) - 1
        self._waiting = deque(
            taken.with_kinds(self._points.get(taken.end, NO_POINT)) for taken in waiting
        )
        self._coverage = WindowCoverage.of(self._layout)
        self._rows_only = self._layout.full_only
        self._stripped = fork is not None and fork < len(prompt) - 1
        self.stripped_points = 0
        """Stride points that the reply did not get."""

    @property
    def tokens(self) -> bytes:
        """Encoded ids of the prompt and of the reply so far."""
        return bytes(self._tokens)

    @property
    def origins(self) -> frozenset[KeyId]:
        """Issuers that any part of the state comes from."""
        return self._origins

    def prefilled(self, live: Live) -> None:
        """Prefill stopped: take everything up to here."""
        self._cold = self._cold and live.held % self._numerics.chunk == 0
        self._take(live, self._points.get(live.held, NO_POINT))
        self._store_decided()

    def generated(self, token: int, held: int, live: Callable[[], Live]) -> None:
        """One more token is in the cache: take rows at block ends.

        Args:
            token: its id.
            held: tokens in the cache, this one included.
            live: gives the caches that hold exactly these; called at block ends only.
        """
        self._tokens += encode_tokens([token])
        self._cold = False
        if held % self._block == 0:
            # The reply may still end here.
            self._horizon = held - 1
            self._take(live(), self._stride_at(held))
            self._store_decided()

    def finished(self, live: Live) -> tuple[Taken, ...]:
        """The reply ended, its end is a point: returns what only that point needs."""
        held = live.held
        kinds = self._stride_at(held) | {PointKind.REPLY}
        self._horizon = max(self._horizon, held - 1)
        if held > self._done:
            self._take(live, kinds)
        elif self._waiting and self._waiting[-1].end == held:
            self._mark(live, kinds)
        self._store_decided()
        # So far the request has used all that it restored and stored.
        self.chain.use()
        tail, self._waiting = tuple(self._waiting), deque()
        return tail

    def close(self) -> None:
        """End the chain; what was stored stays."""
        self.chain.close()

    def _stride_at(self, held: int) -> frozenset[PointKind]:
        if held % self._stride:
            return NO_POINT
        if self._stripped:
            self.stripped_points += 1
            return NO_POINT
        return self._points.setdefault(held, frozenset({PointKind.STRIDE}))

    def _take(self, live: Live, kinds: frozenset[PointKind]) -> None:
        """Copy what is new; `kinds` are those of the position that is held now."""
        # Where a point's windows begin there is a cut, too: no row more is stored.
        begins = (point - self._coverage.window for point in self._points)
        at = (*self._points, *begins)
        ends = cuts(self._done, live.held, self._block, at)
        if not ends:
            return
        segments, state = take(
            self._layout,
            live.caches,
            row=live.row,
            held=live.held,
            cuts=ends,
            state=bool(kinds),
            windows=[cut for cut in ends if kinds or self._needed(*cut) is not False],
        )
        for (start, end), leaves in zip(ends, segments, strict=True):
            found, here = dict(leaves), self._points.get(end, NO_POINT)
            if end == live.held:
                here = kinds
                if state is not None:
                    found[BlobClass.STATE] = state
            if self._layout.has(BlobClass.STATE) and BlobClass.STATE not in found:
                # A whole layers' state exists at `held` only; rows are cut anywhere.
                here = NO_POINT
            self._waiting.append(self._taken(start, end, found, here))
        self._done = live.held

    def _mark(self, live: Live, kinds: frozenset[PointKind]) -> None:
        """Make the end of the newest segment a point."""
        _, state = take(
            self._layout,
            live.caches,
            row=live.row,
            held=live.held,
            cuts=[],
            state=True,
        )
        if self._layout.has(BlobClass.STATE) and state is None:
            return
        last = self._waiting.pop()
        leaves = dict(last.leaves)
        if state is not None:
            leaves[BlobClass.STATE] = state
        self._waiting.append(
            attrs.evolve(last, leaves=leaves, kinds=last.kinds | kinds)
        )

    def _taken(
        self,
        start: int,
        end: int,
        leaves: Mapping[BlobClass, Leaves],
        kinds: frozenset[PointKind],
    ) -> Taken:
        return Taken(
            start=start,
            end=end,
            key=self._keys.key(self._tokens, end),
            tokens=bytes(self._tokens[start * TOKEN_SIZE : end * TOKEN_SIZE]),
            leaves=leaves,
            kinds=kinds,
            provenance=Provenance(
                lineage=Lineage.COLD if self._cold else Lineage.DERIVED,
                numerics=self._numerics,
                origins=self._origins,
            ),
        )

    def _needed(self, start: int, end: int) -> bool | None:
        """Whether a segment's window rows are needed by a point; None: not known yet.

        Nor is it stored before it is known whether its own end is a point.
        """
        ahead = [point for point in self._points if point >= end]
        if any(self._coverage.includes(start, end, point) for point in ahead):
            return True
        if end not in self._points and end > self._horizon and not self._rows_only:
            return None
        unknown = self._horizon + 1
        return None if self._coverage.includes(start, end, unknown) else False

    def _store_decided(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if (needed := self._needed(first.start, first.end)) is None:
                return
            self.chain.append(first.segment(self._layout, window=needed))
            self._waiting.popleft()
