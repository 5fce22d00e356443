"""The words in which the cache is spoken to: nodes, namespaces, selections, matches.

Plain data, without I/O. A `NodeRecord` is one stored segment in one variant; a `Match`
is a path of them from the root; a `NewSegment` is what a running request hands over to
be stored.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

import attrs

from kvport.manifest.digests import BlobDigest, Key, derive
from kvport.manifest.domains import Domain
from kvport.manifest.identity import (
    KeyId,
    Numerics,
    PointKind,
    Provenance,
    StateIdentity,
)
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import ROOT_NODE, NodeId

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Whatever a blob's bytes come in; a memoryview must be contiguous."""


@attrs.frozen
class BlobRef:
    """A stored blob: its class, its digest, and its size in bytes."""

    blob_class: BlobClass
    digest: BlobDigest
    size: int


@attrs.frozen
class NodeRecord:
    """One stored segment: rows [start, end) in one variant, below its parent.

    Attributes:
        id: name of the path that ends here.
        parent: the node before, `ROOT_NODE` at token 0.
        start: first position.
        end: position after the last.
        key: key(end).
        tokens: encoded ids of [start, end).
        blobs: in the order kv, window, state; those that there are. The id names those
            that it was stored with, of which some may have gone since.
        kinds: why `end` is kept on purpose; empty if it is not.
        attestations: what is claimed about the bytes, at least one statement.
    """

    id: NodeId
    parent: NodeId
    start: int
    end: int
    key: Key
    tokens: bytes = attrs.field(repr=False)
    blobs: tuple[BlobRef, ...]
    kinds: frozenset[PointKind]
    attestations: tuple[Provenance, ...]

    def blob(self, blob_class: BlobClass) -> BlobRef | None:
        """The node's blob of this class, if it has one."""
        return next((b for b in self.blobs if b.blob_class is blob_class), None)


@attrs.frozen
class Namespace:
    """One state identity and block size in one scope; `id` names its directory."""

    id: str
    identity: StateIdentity
    scope: str
    block_size: int

    @property
    def layout(self) -> StateLayout:
        """Layout of the states that live here."""
        return self.identity.layout

    @classmethod
    def of(cls, identity: StateIdentity, scope: str, block_size: int) -> "Namespace":
        """Derive the id: the same on every machine and in every process."""
        name = scope.encode()
        data = identity.digest + struct.pack("<II", block_size, len(name)) + name
        return cls(derive(Domain.NAMESPACE, data).hex(), identity, scope, block_size)


@attrs.frozen
class ExactRule:
    """Restore only what an empty cache would compute bit for bit.

    Attributes:
        chunk: restore at multiples of this many tokens only.
        numerics: this machine's; state of others is passed over.
    """

    chunk: int
    numerics: Numerics


@attrs.frozen
class Selection:
    """Which restore points a lookup may take.

    Attributes:
        limit: restore at most this many tokens.
        local: this node's key; state is made here if it is the only origin.
        exact: the rule of policy `exact`, None under `nearest`.
        within: only these nodes (one artifact's path); None for all.
    """

    limit: int
    local: KeyId
    exact: ExactRule | None = None
    within: frozenset[NodeId] | None = None


@attrs.frozen
class Match:
    """What a lookup found: the path, root first, and how far it restores.

    Attributes:
        nodes: the last one may be used in part only (rows up to `position`).
        position: tokens restorable.
    """

    nodes: tuple[NodeRecord, ...]
    position: int

    @property
    def tip(self) -> NodeId:
        """The last node that is used whole, `ROOT_NODE` if there is none."""
        whole = [node.id for node in self.nodes if node.end <= self.position]
        return whole[-1] if whole else ROOT_NODE

    @property
    def base(self) -> int:
        """Where `tip` ends; 0 at the root."""
        return max((n.end for n in self.nodes if n.end <= self.position), default=0)


@attrs.frozen
class NewSegment:
    """Rows [start, end) to be stored, with what is claimed about them.

    Attributes:
        start: where the chain ends so far.
        end: position after the last row.
        key: key(end).
        tokens: encoded ids of [start, end).
        kinds: why `end` is kept on purpose.
        blobs: for each class the buffers that make up the blob, in order. They must
            not change until the segment is stored.
        provenance: the one statement that is true of these bytes.
    """

    start: int
    end: int
    key: Key
    tokens: bytes = attrs.field(repr=False)
    kinds: frozenset[PointKind]
    blobs: Mapping[BlobClass, Sequence[Bytes]] = attrs.field(repr=False)
    provenance: Provenance

    @property
    def nbytes(self) -> int:
        """Size of all blobs."""
        return sum(nbytes(part) for parts in self.blobs.values() for part in parts)


def nbytes(buffer: Bytes) -> int:
    """Size in bytes, whatever the item size of a memoryview."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class RemovalReason(StrEnum):
    """Why a node went; nothing goes without one."""

    EVICTED = "evicted"
    DAMAGED = "damaged"
    MISSING = "missing"
    SUPERSEDED = "superseded"


@attrs.frozen
class Removed:
    """A node that went, told to whoever answers why there is nothing to restore."""

    namespace: str
    key: Key
    end: int
    reason: RemovalReason


@attrs.frozen
class Admitted:
    """What an admission did: nodes that are new, and nodes that were there."""

    admitted_segments: int
    present_segments: int
