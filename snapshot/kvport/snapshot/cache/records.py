"""The words in which the cache is spoken to: nodes, namespaces, selections, matches.

Plain data, without I/O. A `NodeRecord` is one stored segment in one variant; a `Match`
is a path of them from the root; a `NewSegment` is what a running request hands over to
be stored.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import attrs
from attrs.validators import ge, min_len

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


_NAMESPACE_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@attrs.frozen
class BlobRef:
    """A stored blob: its class, its digest, and its size in bytes.

    Attributes:
        blob_class: what it holds.
        digest: of the blob alone.
        size: likewise.
        trailer: bytes that follow it in its file, the ids of its tokens.
    """

    blob_class: BlobClass
    digest: BlobDigest
    size: int
    trailer: int = attrs.field(default=0, eq=False)


@attrs.frozen
class NodeRecord:
    """One stored segment: rows [start, end) in one variant, below its parent.

    Attributes:
        id: name of the path that ends here.
        parent: the node before, `ROOT_NODE` at token 0.
        start: first position.
        end: position after the last.
        key: key(end).
        blobs: in the order kv, window, state; those that there are. The id names those
            that it was stored with, of which some may have gone since.
        kinds: why `end` is kept on purpose; empty if it is not.
        attestations: what is claimed about the bytes, at least one statement.
        tokens: encoded ids of [start, end), of a node that is to be stored. The index
            keeps none: what it answers has no tokens.
    """

    id: NodeId
    parent: NodeId
    start: int
    end: int
    key: Key
    blobs: tuple[BlobRef, ...]
    kinds: frozenset[PointKind]
    attestations: tuple[Provenance, ...]
    tokens: bytes = attrs.field(default=b"", repr=False, eq=False)

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


def is_namespace_id(text: str) -> bool:
    """Whether it has the form that `Namespace.of` gives: it names a directory."""
    return bool(_NAMESPACE_ID.fullmatch(text))


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


@attrs.frozen
class Pinned:
    """What became of a wish to keep a path.

    Attributes:
        tokens: length of what is kept, from the root to a restore point; 0 for nothing.
        until: seconds from the epoch; None if nothing is kept.
        reason: why the rest is not kept; None if all is.
    """

    tokens: int
    until: int | None
    reason: str | None


def _unheard(_: Pinned) -> None:
    """Of a wish that nobody waits for."""


@attrs.frozen
class Pin:
    """A wish to keep a request's path, whoever else uses it or not.

    Attributes:
        owner: whose pin it is; the same owner's later pin of the path replaces it.
        seconds: from when it is stored.
        told: called by the writer once it is known what is kept; never if the path
            was not begun, or its cache went away before.

    Raises:
        ValueError: no owner, or less than a second.
    """

    owner: str = attrs.field(validator=min_len(1))
    seconds: int = attrs.field(validator=ge(1))
    told: Callable[[Pinned], None] = attrs.field(default=_unheard, eq=False)


class RemovalReason(StrEnum):
    """Why a node went; nothing goes without one."""

    EVICTED = "evicted"
    DAMAGED = "damaged"
    MISSING = "missing"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    INCOMPATIBLE = "incompatible"
    """Of an engine version or a model that is gone."""
    POINTLESS = "pointless"
    """Rows after the last restore point of their branch."""
    QUOTA = "quota"
    CLEARED = "cleared"
    RECLAIMED = "reclaimed"
    """Its model was unloaded."""
    TAMPERED = "tampered"
    REVOKED = "revoked"
    """All that is claimed about it names a key that was revoked."""


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
