"""Verification of a manifest: the one way to a `VerifiedManifest`.

Each failure is final, and its code says what failed. In this order:

 1. The envelope is not too large: `limit_exceeded`.
 2. It has its one byte form (envelope.py): `format`.
 3. The payload type is ours: `unsupported_version`.
 4. Every signer is in the trust list, now, in the role `export`: `untrusted_key`; and
    every signature verifies: `signature`.
 5. The payload is canonical JSON with exactly a manifest's fields: `format`.
 6. Format version and kind of artifact are ours: `unsupported_version`. This is looked
    at before the fields, which another version may have others of.
 7. The issuer's key is one of those that verified: `signature`.
 8. The artifact is not from the future, and has not expired: `expired`. It is for this
    node, and of a scope that every signer is trusted with: `wrong_scope`.
 9. State identity, tokenizer and block size are those here: `binding_mismatch`. Every
    signer is trusted with the model here: `untrusted_key`.
10. Positions and sizes add up (arithmetic.py): `arithmetic`; neither the container nor
    its blobs are too large: `limit_exceeded`.
11. Size and digest of the token entry, and every key recomputed from it
    (`VerifiedManifest.nodes`): `token_mismatch`.

Until step 4 has passed, nothing is built from the bytes but the decoded payload.
Nothing here reads a blob, a clock or a file. What follows belongs to the importer:
container, digests and headers of blobs (ustar.py, `BlobLayout.check_header`), and
admission.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final

import attrs

from kvport.manifest.arithmetic import PlacedBlob, check_arithmetic
from kvport.manifest.canonical import strict_loads
from kvport.manifest.codec import Codec
from kvport.manifest.digests import (
    ArtifactId,
    BlobDigest,
    Key,
    artifact_id,
    blob_digest,
)
from kvport.manifest.domains import PAYLOAD_TYPE
from kvport.manifest.envelope import Envelope, open_envelope
from kvport.manifest.errors import (
    BindingMismatchError,
    ExpiredError,
    LimitExceededError,
    ScopeError,
    SignatureError,
    TokenMismatchError,
    UnsupportedVersionError,
    UntrustedKeyError,
)
from kvport.manifest.identity import KeyId, PointKind, Provenance, StateIdentity
from kvport.manifest.layout import BlobClass, BlobLayout
from kvport.manifest.limits import ARTIFACT_BYTES, CLOCK_SKEW_SECONDS
from kvport.manifest.model import Manifest
from kvport.manifest.nodes import ROOT_NODE, NodeId, node_id
from kvport.manifest.parts import Blob
from kvport.manifest.tokens import prefix_keys
from kvport.manifest.trust import Role, TrustEntry, TrustList
from kvport.manifest.ustar import (
    ENVELOPE_NAME,
    TOKENS_NAME,
    Entry,
    blob_name,
    container_size,
)

_SKEW: Final = timedelta(seconds=CLOCK_SKEW_SECONDS)
_SEAL: Final = object()


@attrs.frozen
class Local:
    """What an artifact must fit here.

    Attributes:
        identity: of the model as loaded here.
        tokenizer: digest of its tokenizer's files.
        block_size: tokens in a block.
        model: the name under which it is served here, which trust entries refer to.
    """

    identity: StateIdentity
    tokenizer: BlobDigest
    block_size: int
    model: str


@attrs.frozen
class BlobEntry(Entry):
    """An entry of the container that is a blob.

    Attributes:
        digest: of its plain bytes.
        layout: what these must be.
        codec: how they are encoded; `size` is that of the encoded ones.
    """

    digest: BlobDigest
    layout: BlobLayout
    codec: Codec


@attrs.frozen(kw_only=True)
class VerifiedNode:
    """One segment of the path, named and ready to be admitted.

    Attributes:
        id: names the path from token 0 to here, in this variant.
        parent: id of the node before, `ROOT_NODE` for the first.
        start: first token of the rows.
        end: one past the last.
        key: key(end), recomputed.
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
    """A manifest that passed steps 1 to 10; only `verify` makes one.

    Attributes:
        manifest: what was signed.
        artifact_id: digest of the payload.
        payload: the signed bytes.
        envelope: the received bytes.
        size: bytes of the whole container.
    """

    manifest: Manifest
    artifact_id: ArtifactId
    payload: bytes = attrs.field(repr=False)
    envelope: bytes = attrs.field(repr=False)
    size: int
    _entries: tuple[Entry, ...] = attrs.field(repr=False)

    def __init__(
        self,
        seal: object,
        *,
        manifest: Manifest,
        payload: bytes,
        envelope: bytes,
        entries: tuple[Entry, ...],
    ) -> None:
        if seal is not _SEAL:
            raise TypeError("a verified manifest comes from verify()")
        self.__attrs_init__(
            manifest=manifest,
            artifact_id=artifact_id(payload),
            payload=payload,
            envelope=envelope,
            size=container_size(entries),
            entries=entries,
        )

    def entries(self) -> tuple[Entry, ...]:
        """The container's entries in order: envelope, tokens, then `BlobEntry`s."""
        return self._entries

    def nodes(self, tokens: bytes) -> tuple[VerifiedNode, ...]:
        """Step 11: check the token entry, then name the path's nodes.

        Args:
            tokens: content of the entry `tokens`.

        Raises:
            TokenMismatchError: the bytes, or a key, are not those that were signed.
        """
        manifest = self.manifest
        prefix = manifest.prefix
        if len(tokens) != prefix.size or blob_digest(tokens) != prefix.digest:
            raise TokenMismatchError("the token entry is not the signed one")
        ends = [segment.end for segment in manifest.segments]
        keys = prefix_keys(manifest.identity.digest, manifest.block_size, tokens, ends)
        if keys != [segment.key for segment in manifest.segments]:
            raise TokenMismatchError("a key is not that of the token ids")
        points = {point.position: point for point in manifest.points}
        parent, nodes = ROOT_NODE, []
        for segment in manifest.segments:
            point = points.get(segment.end)
            blobs = (*segment.blobs, *(point.blobs if point else ()))
            by_class = {blob.blob_class: blob for blob in blobs}
            digests = {name: blob.digest for name, blob in by_class.items()}
            node = VerifiedNode(
                id=node_id(parent, segment.key, digests),
                parent=parent,
                start=segment.start,
                end=segment.end,
                key=segment.key,
                blobs=MappingProxyType(by_class),
                kinds=point.kinds if point else (),
                provenance=segment.provenance,
            )
            nodes.append(node)
            parent = node.id
        return tuple(nodes)


def verify(
    envelope: bytes,
    *,
    trust: TrustList,
    now: datetime,
    local: Local | None,
    own_key: KeyId | None,
    max_bytes: int = ARTIFACT_BYTES,
) -> VerifiedManifest:
    """Verify an envelope, steps 1 to 10 of the module's list.

    Args:
        envelope: the received bytes.
        trust: this node's allow-list.
        now: aware.
        local: what the state must fit; None for an inspection without a model, which
            leaves out step 9.
        own_key: this node's key, which an audience must include; None is nobody.
        max_bytes: cap on the container's size, at most `ARTIFACT_BYTES`.

    Raises:
        KvportError: a subclass, by the first step that failed.
    """
    opened = open_envelope(envelope)
    if opened.payload_type != PAYLOAD_TYPE:
        raise UnsupportedVersionError("an envelope with another type of payload")
    signers = _check_signatures(opened, trust, now)
    manifest = Manifest.from_json(strict_loads(opened.payload))
    if all(signer.key_id != manifest.issuer.key_id for signer in signers):
        raise SignatureError("the issuer did not sign")
    _check_policy(manifest, signers, now, own_key)
    if local is not None:
        _check_local(manifest, signers, local)
    blobs = check_arithmetic(manifest)
    entries = _entries(manifest, len(envelope), blobs)
    if container_size(entries) > min(max_bytes, ARTIFACT_BYTES):
        raise LimitExceededError("the artifact is too large")
    if sum(blob.layout.size for blob in blobs) > ARTIFACT_BYTES:
        raise LimitExceededError("the artifact's blobs are too large")
    return VerifiedManifest(
        _SEAL,
        manifest=manifest,
        payload=opened.payload,
        envelope=envelope,
        entries=entries,
    )


def _check_signatures(
    opened: Envelope, trust: TrustList, now: datetime
) -> list[TrustEntry]:
    signers = [
        trust.allows(signature.key_id, now=now, role=Role.EXPORT)
        for signature in opened.signatures
    ]
    message = opened.message
    for signature, signer in zip(opened.signatures, signers, strict=True):
        signer.public_key.verify(signature.value, message)
    return signers


def _check_policy(
    manifest: Manifest,
    signers: Sequence[TrustEntry],
    now: datetime,
    own_key: KeyId | None,
) -> None:
    if manifest.created > now + _SKEW:
        raise ExpiredError("the artifact was created in the future")
    if manifest.expires <= now:
        raise ExpiredError("the artifact has expired")
    if manifest.audience and own_key not in manifest.audience:
        raise ScopeError("the artifact was issued for other nodes")
    if not all(signer.allows_scope(manifest.scope) for signer in signers):
        raise ScopeError("a signer is not trusted with the artifact's scope")


def _check_local(
    manifest: Manifest, signers: Sequence[TrustEntry], local: Local
) -> None:
    if not all(signer.allows_model(local.model) for signer in signers):
        raise UntrustedKeyError("a signer is not trusted with this model")
    fields = list(manifest.identity.mismatched_fields(local.identity))
    if manifest.tokenizer != local.tokenizer:
        fields.append("tokenizer")
    if manifest.block_size != local.block_size:
        fields.append("block_size")
    if fields:
        raise BindingMismatchError(
            f"the state does not fit here: {', '.join(fields)}", fields=fields
        )


def _entries(
    manifest: Manifest, envelope_size: int, blobs: Sequence[PlacedBlob]
) -> tuple[Entry, ...]:
    return (
        Entry(ENVELOPE_NAME, envelope_size),
        Entry(TOKENS_NAME, manifest.prefix.size),
        *(
            BlobEntry(
                name=blob_name(blob.digest),
                size=blob.encoded_size,
                digest=blob.digest,
                layout=blob.layout,
                codec=blob.codec,
            )
            for blob in blobs
        ),
    )
