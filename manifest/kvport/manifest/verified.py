"""A verified manifest: what follows in the container, and the path's nodes.

Only verification makes one (signed.py), so that whoever holds one need not ask.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.codec import Codec
from kvport.manifest.digests import ArtifactId, BlobDigest, Key, blob_digest
from kvport.manifest.errors import TokenMismatchError
from kvport.manifest.identity import PointKind, Provenance, StateIdentity
from kvport.manifest.layout import BlobClass
from kvport.manifest.model import Manifest
from kvport.manifest.nodes import ROOT_NODE, NodeId, node_id
from kvport.manifest.parts import Blob
from kvport.manifest.sealed import TOKENS_CONTEXT
from kvport.manifest.sealing import open_message
from kvport.manifest.tokens import prefix_keys
from kvport.manifest.ustar import Entry, container_size

PROOF: Final = object()
"""What the constructors of verified things ask for."""


@attrs.frozen
class SealedEntry(Entry):
    """An entry of the container that is a sealed message; `digest` is of its bytes."""

    digest: BlobDigest


@attrs.frozen
class BlobEntry(Entry):
    """An entry of the container that is a blob.

    Attributes:
        digest: of its plain bytes.
        layout: what these must be.
        codec: how they are encoded; `size` is that of the encoded ones.
        seal: of the message that holds the encoded bytes, None if they are not sealed;
            `size` is then that of the message.
    """

    digest: BlobDigest
    layout: BlobLayout
    codec: Codec
    seal: "Seal | None" = None


@attrs.frozen
class Seal:
    """Key of a sealed blob's message, 32 bytes, and digest of the message."""

    key: bytes = attrs.field(repr=False)
    digest: BlobDigest


@attrs.frozen(kw_only=True)
class VerifiedNode:
    """One segment of the path, named and ready to be admitted.

    Attributes:
        id: names the path from token 0 to here, in this variant.
        parent: id of the node before, `ROOT_NODE` for the first.
        start: first token of the rows.
        end: one past the last.
        key: key(end), recomputed, under the identity that it is admitted as.
        blobs: by class, the boundary at `end` included.
        kinds: of the point at `end`; empty if there is none.
        provenance: what the signers say about the node.
    """

    id: NodeId
    parent: NodeId
    start: int
    end: int
    key: Key
    blobs: Mapping[BlobClass, Blob]
    kinds: tuple[PointKind, ...]
    provenance: Provenance


@attrs.frozen(init=False)
class VerifiedManifest:
    """A manifest that passed steps 1 to 10.

    Attributes:
        manifest: what was signed, or sealed within what was signed.
        artifact_id: digest of the signed payload.
        payload: the signed bytes.
        envelope: the received bytes.
        size: bytes of the whole container.
        admitted_as: the identity whose keys its nodes have: the manifest's, or that of
            a model here that an equivalence pair takes it for.
    """

    manifest: Manifest
    artifact_id: ArtifactId
    payload: bytes = attrs.field(repr=False)
    envelope: bytes = attrs.field(repr=False)
    size: int
    admitted_as: StateIdentity
    _entries: tuple[Entry, ...] = attrs.field(repr=False)
    _tokens_key: bytes | None = attrs.field(repr=False)

    def __init__(
        self,
        proof: object,
        *,
        manifest: Manifest,
        artifact: ArtifactId,
        payload: bytes,
        envelope: bytes,
        entries: tuple[Entry, ...],
        tokens_key: bytes | None,
        admitted_as: StateIdentity,
    ) -> None:
        if proof is not PROOF:
            raise TypeError("a verified manifest comes from verify()")
        self.__attrs_init__(
            manifest=manifest,
            artifact_id=artifact,
            payload=payload,
            envelope=envelope,
            size=container_size(entries),
            admitted_as=admitted_as,
            entries=entries,
            tokens_key=tokens_key,
        )

    def entries(self) -> tuple[Entry, ...]:
        """The container's entries in order.

        Of a plain artifact: envelope, tokens, then `BlobEntry`s. Of a sealed one the
        private part and the tokens, both `SealedEntry`s, stand between.
        """
        return self._entries

    @property
    def is_sealed(self) -> bool:
        """Whether the manifest was found in a sealed artifact."""
        return self._tokens_key is not None

    def token_bytes(self, data: bytes) -> bytes:
        """The encoded ids in the content of the entry `tokens`.

        Raises:
            DecryptionError: they are sealed, and were changed.
        """
        if self._tokens_key is None:
            return data
        return open_message(self._tokens_key, TOKENS_CONTEXT, data)

    def nodes(self, tokens: bytes) -> tuple[VerifiedNode, ...]:
        """Step 11: check the token ids, then name the path's nodes.

        Args:
            tokens: the encoded ids.

        Raises:
            TokenMismatchError: the bytes, or a key, are not those that were signed.
        """
        manifest = self.manifest
        prefix = manifest.prefix
        if len(tokens) != prefix.size or blob_digest(tokens) != prefix.digest:
            raise TokenMismatchError("the token entry is not the signed one")
        ends = [segment.end for segment in manifest.segments]
        block = manifest.block_size
        keys = prefix_keys(manifest.identity.digest, block, tokens, ends)
        if keys != [segment.key for segment in manifest.segments]:
            raise TokenMismatchError("a key is not that of the token ids")
        if self.admitted_as != manifest.identity:
            keys = prefix_keys(self.admitted_as.digest, block, tokens, ends)
        points = {point.position: point for point in manifest.points}
        parent, nodes = ROOT_NODE, []
        for segment, key in zip(manifest.segments, keys, strict=True):
            point = points.get(segment.end)
            blobs = (*segment.blobs, *(point.blobs if point else ()))
            by_class = {blob.blob_class: blob for blob in blobs}
            digests = {name: blob.digest for name, blob in by_class.items()}
            node = VerifiedNode(
                id=node_id(parent, key, digests),
                parent=parent,
                start=segment.start,
                end=segment.end,
                key=key,
                blobs=MappingProxyType(by_class),
                kinds=point.kinds if point else (),
                provenance=segment.provenance,
            )
            nodes.append(node)
            parent = node.id
        return tuple(nodes)
