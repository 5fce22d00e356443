"""Issuing: from a stored path to the manifest that is signed for it.

The same path gives the same manifest, but for nonce and times. Of several statements
about a node one is signed: that it was made here before others, `cold` before
`derived`.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import attrs

from kvport.manifest.digests import Key, blob_digest, parse_digest
from kvport.manifest.identity import KeyId, PointKind, Provenance
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import POINTS
from kvport.manifest.model import Info, Issuer, Manifest
from kvport.manifest.parts import Blob, Point, Prefix, Segment
from kvport.snapshot.cache.records import Namespace, NodeRecord

LIFETIME: Final = timedelta(days=30)
"""How long an artifact can be imported; what was admitted does not expire with it."""


@attrs.frozen(kw_only=True)
class Issue:
    """Who issues an artifact, for which model, when and for whom.

    Attributes:
        signer: this node's key.
        issuer_name: for people.
        model_name: under which the model is served here; it is not signed.
        tokenizer: digest of its tokenizer's files, `blake3:<64 hex>`.
        now: aware.
        lifetime: until the artifact expires.
        audience: key ids of the nodes it is for; empty for anyone.
        info: for people.
    """

    signer: SigningKey
    issuer_name: str
    model_name: str
    tokenizer: str
    now: datetime
    lifetime: timedelta = LIFETIME
    audience: frozenset[KeyId] = frozenset()
    info: Info = attrs.field(factory=Info)

    @property
    def issuer(self) -> KeyId:
        """Id of the signing key."""
        return self.signer.public.key_id


def preferred(node: NodeRecord, local: KeyId) -> Provenance:
    """The statement about a node that is signed; `local` is this node's key."""
    here = frozenset({local})
    return min(
        node.attestations,
        key=lambda said: (
            said.origins != here,
            said.lineage,
            said.numerics.digest,
            sorted(said.origins),
        ),
    )


def write_manifest(
    namespace: Namespace, path: Sequence[NodeRecord], tokens: bytes, issue: Issue
) -> Manifest:
    """The manifest of a path of whole nodes.

    Args:
        namespace: where the path is stored.
        path: nodes from the root on.
        tokens: their encoded ids.
        issue: who signs, and when.
    """
    said = [preferred(node, issue.issuer) for node in path]
    points = [
        _point(namespace, node, provenance, is_tip=node is path[-1])
        for node, provenance in zip(path, said, strict=True)
    ]
    now = issue.now.replace(microsecond=0)
    return Manifest(
        block_size=namespace.block_size,
        identity=namespace.identity,
        tokenizer=parse_digest(issue.tokenizer),
        prefix=_prefix(path[-1].key, path[-1].end, tokens),
        segments=tuple(map(_segment, path, said)),
        # A conversation may have more points than a manifest: the newest serve.
        points=tuple(point for point in points if point is not None)[-POINTS:],
        scope=namespace.scope,
        issuer=Issuer(issue.issuer, issue.issuer_name),
        created=now,
        expires=now + issue.lifetime,
        nonce=secrets.token_hex(16),
        audience=tuple(sorted(issue.audience)),
        info=issue.info,
    )


def _prefix(key: Key, length: int, tokens: bytes) -> Prefix:
    return Prefix(length, key, blob_digest(tokens), len(tokens))


def _segment(node: NodeRecord, provenance: Provenance) -> Segment:
    blobs = _blobs(node, state=False)
    return Segment(node.start, node.end, node.key, provenance, blobs)


def _point(
    namespace: Namespace, node: NodeRecord, provenance: Provenance, *, is_tip: bool
) -> Point | None:
    kinds = node.kinds
    if namespace.layout.has(BlobClass.STATE):
        if node.blob(BlobClass.STATE) is None:
            return None
    elif is_tip and not kinds:
        # Any segment's end restores here; that this one does is signed as a point.
        kinds = frozenset({PointKind.PROMPT})
    if not kinds:
        return None
    return Point(node.end, tuple(sorted(kinds)), provenance, _blobs(node, state=True))


def _blobs(node: NodeRecord, *, state: bool) -> tuple[Blob, ...]:
    return tuple(
        Blob(ref.blob_class, ref.digest, ref.size)
        for ref in node.blobs
        if (ref.blob_class is BlobClass.STATE) == state
    )
