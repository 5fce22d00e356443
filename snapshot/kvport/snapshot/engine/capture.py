"""Capture: new rows of one running request, from its live caches to its chain.

A `Recorder` follows one request. It is told where the live caches are after each step
and copies what is new, right then: segments cut at block ends and points, the whole
layers' state where the position is a point. What it appends is labelled with its
lineage: `cold` as long as the prefix was prefilled alone and every stop so far was a
chunk multiple, `derived` from then on.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from kvport.manifest.identity import KeyId, Lineage, Numerics, PointKind, Provenance
from kvport.manifest.layout import BlobClass
from kvport.manifest.tokens import TOKEN_SIZE, KeyChain, encode_tokens
from kvport.snapshot.cache.cache import Chain
from kvport.snapshot.cache.records import Match, Namespace, NewSegment
from kvport.snapshot.engine.mlx_private import Live
from kvport.snapshot.engine.stops import Plan, cuts
from kvport.snapshot.state.blobs import to_buffers
from kvport.snapshot.state.rows import Leaves, take

_NONE: Final[frozenset[PointKind]] = frozenset()


@attrs.frozen
class Base:
    """What a request computes on top of."""

    end: int
    """Tokens in the whole nodes of the restored path; capture begins here."""
    cold: bool
    """Whether what is computed next can be cold."""
    origins: frozenset[KeyId]
    """Issuers that any part of the restored state came from."""


def base_of(match: Match | None, *, local: KeyId, numerics: Numerics) -> Base:
    """The base that a match gives; without one, token 0.

    Where several statements about a node are true, the one made here is inherited.
    """
    if match is None:
        return Base(0, cold=True, origins=frozenset())
    here = frozenset({local})
    cold, origins = True, set[KeyId]()
    for node in match.nodes:
        chosen = min(node.attestations, key=lambda a: (a.origins != here, a.lineage))
        origins |= chosen.origins
        cold = cold and chosen.lineage is Lineage.COLD and chosen.numerics == numerics
    return Base(match.base, cold=cold, origins=frozenset(origins))


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
    ) -> None:
        self._layout = namespace.layout
        self._block = namespace.block_size
        self._chain = chain
        self._plan = plan
        self._done = base.end
        self._cold = base.cold and restored % numerics.chunk == 0
        self._origins = base.origins | {local}
        self._numerics = numerics
        self._stride = stride
        self._tokens = bytearray(encode_tokens(prompt))
        self._keys = KeyChain(namespace.identity.digest, namespace.block_size)

    def prefilled(self, live: Live) -> None:
        """Prefill stopped: take everything up to here."""
        self._cold = self._cold and live.held % self._numerics.chunk == 0
        self._capture(live, self._plan.points)

    def generated(self, live: Live, token: int) -> None:
        """One more token is in the cache: take rows at block ends."""
        self._tokens += encode_tokens([token])
        self._cold = False
        if live.held % self._block == 0:
            kinds = (
                {live.held: frozenset({PointKind.STRIDE})}
                if live.held % self._stride == 0
                else {}
            )
            self._capture(live, kinds)

    def finished(self, live: Live) -> None:
        """The reply ended: take the rest, and make its end a restore point."""
        self._capture(live, {live.held: frozenset({PointKind.REPLY})})

    def close(self) -> None:
        """Let the chain go; what was captured stays."""
        self._chain.close()

    def _capture(self, live: Live, points: Mapping[int, frozenset[PointKind]]) -> None:
        ends = cuts(self._done, live.held, self._block, points)
        if not ends:
            return
        # A whole layers' state exists at `held` only; rows can be cut anywhere.
        segments, state = take(
            self._layout,
            live.caches,
            row=live.row,
            held=live.held,
            cuts=ends,
            state=live.held in points,
        )
        for (start, end), leaves in zip(ends, segments, strict=True):
            blobs = dict(leaves)
            if state is not None and end == live.held:
                blobs[BlobClass.STATE] = state
            kinds = points.get(end, _NONE)
            if self._layout.has(BlobClass.STATE) and BlobClass.STATE not in blobs:
                kinds = _NONE
            self._append(start, end, blobs, kinds)
        self._done = live.held

    def _append(
        self,
        start: int,
        end: int,
        blobs: Mapping[BlobClass, Leaves],
        kinds: frozenset[PointKind],
    ) -> None:
        self._chain.append(
            NewSegment(
                start=start,
                end=end,
                key=self._keys.key(self._tokens, end),
                tokens=bytes(self._tokens[start * TOKEN_SIZE : end * TOKEN_SIZE]),
                kinds=kinds,
                blobs={
                    blob_class: to_buffers(
                        self._layout, blob_class, end - start, leaves
                    )
                    for blob_class, leaves in blobs.items()
                },
                provenance=Provenance(
                    lineage=Lineage.COLD if self._cold else Lineage.DERIVED,
                    numerics=self._numerics,
                    origins=self._origins,
                ),
            )
        )
