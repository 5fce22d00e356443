"""What capture works with: where it begins, and segments that are still in memory."""

from collections.abc import Mapping
from typing import Final

import attrs

from kvport.manifest.digests import Key
from kvport.manifest.identity import KeyId, Lineage, Numerics, PointKind, Provenance
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.cache.records import Match, NewSegment
from kvport.snapshot.state.blobs import to_buffers
from kvport.snapshot.state.rows import Leaves

NO_POINT: Final[frozenset[PointKind]] = frozenset()


@attrs.frozen(kw_only=True)
class Base:
    """What a request computes on top of."""

    end: int
    """Tokens that need no capture: those of the restored path's whole nodes, and of a
    tail that was taken over."""
    cold: bool
    """Whether what is computed next can be cold."""
    origins: frozenset[KeyId]
    """Issuers that any part of the restored state came from."""


def base_of(match: Match | None, *, local: KeyId, numerics: Numerics) -> Base:
    """The base that a match gives; without one, token 0.

    Where several statements about a node are true, the one made here is inherited.
    """
    if match is None:
        return Base(end=0, cold=True, origins=frozenset())
    here = frozenset({local})
    cold, origins = True, set[KeyId]()
    for node in match.nodes:
        chosen = min(node.attestations, key=lambda a: (a.origins != here, a.lineage))
        origins |= chosen.origins
        cold = cold and chosen.lineage is Lineage.COLD and chosen.numerics == numerics
    return Base(end=match.base, cold=cold, origins=frozenset(origins))


@attrs.frozen(kw_only=True)
class Taken:
    """A segment in memory: evaluated copies of its rows, and what it will be stored as.

    Without `kinds` and the `state` leaves it is no point, and it may be stored without
    its `window` leaves.
    """

    start: int
    end: int
    key: Key
    tokens: bytes = attrs.field(repr=False)
    leaves: Mapping[BlobClass, Leaves] = attrs.field(repr=False)
    kinds: frozenset[PointKind]
    provenance: Provenance

    def with_kinds(self, kinds: frozenset[PointKind]) -> "Taken":
        """The same segment as another point, or as none."""
        leaves = dict(self.leaves)
        if not kinds:
            leaves.pop(BlobClass.STATE, None)
        return attrs.evolve(self, leaves=leaves, kinds=kinds)

    def blobs(
        self, layout: StateLayout, *, window: bool = True
    ) -> dict[BlobClass, list[memoryview]]:
        """Its blobs as buffers, with or without the window rows."""
        return {
            blob_class: to_buffers(layout, blob_class, self.end - self.start, leaves)
            for blob_class, leaves in self.leaves.items()
            if window or blob_class is not BlobClass.WINDOW
        }

    def segment(self, layout: StateLayout, *, window: bool = True) -> NewSegment:
        """What the cache stores."""
        return NewSegment(
            start=self.start,
            end=self.end,
            key=self.key,
            tokens=self.tokens,
            kinds=self.kinds,
            blobs=self.blobs(layout, window=window),
            provenance=self.provenance,
        )
