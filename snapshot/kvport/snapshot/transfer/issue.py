"""Issuing: from a stored path to the manifest that is signed for it.

The same path gives the same manifest, but for nonce and times. Of several statements
about a node one is signed: that it was made here before others, `cold` before
`derived`.

A manifest has one set of blobs for its points (arithmetic.py), a stored path may have
another: points of it may have lost their blobs, and windowed rows may serve no point
that is listed. Such points and rows are left out. A node's id names all of its blobs,
so that from there on the signed path has other ids than the stored one: whoever imports
it has a variant of its own, at the exporter's too, where it shares the stored blobs.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import attrs

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.digests import Key, blob_digest, parse_digest
from kvport.manifest.identity import KeyId, PointKind, Provenance
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.limits import POINTS
from kvport.manifest.model import Info, Manifest, Session
from kvport.manifest.parts import Blob, Point, Prefix, Segment
from kvport.manifest.recipients import Recipient
from kvport.manifest.terms import Issuer, Terms
from kvport.snapshot.cache.records import Namespace, NodeRecord
from kvport.snapshot.errors import GoneError

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
        compress: whether blobs are encoded that are smaller so.
        session: label of the conversation that it is of; empty for none.
        recipients: who can open it, each once; empty for everyone.
        sealing_secret: of this home, 32 bytes, from which keys of sealed blobs come.
    """

    signer: SigningKey
    issuer_name: str
    model_name: str
    tokenizer: str
    now: datetime
    lifetime: timedelta = LIFETIME
    audience: frozenset[KeyId] = frozenset()
    info: Info = attrs.field(factory=Info)
    compress: bool = False
    session: str = ""
    recipients: tuple[Recipient, ...] = ()
    sealing_secret: bytes = attrs.field(default=b"", repr=False)

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


def restorable(layout: StateLayout, path: Sequence[NodeRecord]) -> list[bool]:
    """For each node of a path from the root, whether a restore can end with it."""
    covered = WindowCoverage.of(layout).restorable(
        (node.start, node.end, node.blob(BlobClass.WINDOW) is not None) for node in path
    )
    if not layout.has(BlobClass.STATE):
        return covered
    return [
        here and node.blob(BlobClass.STATE) is not None
        for here, node in zip(covered, path, strict=True)
    ]


def write_manifest(
    namespace: Namespace,
    path: Sequence[NodeRecord],
    tokens: bytes,
    issue: Issue,
    session: Session,
) -> Manifest:
    """The manifest of a path of whole nodes.

    Args:
        namespace: where the path is stored.
        path: nodes from the root on.
        tokens: their encoded ids.
        issue: who signs, and when.
        session: the conversation that it is of, and how far that has come.

    Raises:
        GoneError: the path's end is no restore point any more.
    """
    layout = namespace.layout
    said = [preferred(node, issue.issuer) for node in path]
    restores = restorable(layout, path)
    if not restores[-1]:
        raise GoneError("what the restore point needs was removed")
    points = [
        Point(node.end, kinds, provenance, _blobs(node, BlobClass.STATE))
        for node, provenance, here in zip(path, said, restores, strict=True)
        if here and (kinds := _kinds(node, is_tip=node is path[-1]))
    ]
    # A conversation may have more points than a manifest: the newest serve.
    points = points[-POINTS:]
    now = issue.now.replace(microsecond=0)
    return Manifest(
        block_size=namespace.block_size,
        identity=namespace.identity,
        tokenizer=parse_digest(issue.tokenizer),
        prefix=_prefix(path[-1].key, path[-1].end, tokens),
        segments=_segments(layout, path, said, points),
        points=tuple(points),
        terms=Terms(
            scope=namespace.scope,
            issuer=Issuer(issue.issuer, issue.issuer_name),
            created=now,
            expires=now + issue.lifetime,
            nonce=secrets.token_hex(16),
            audience=tuple(sorted(issue.audience)),
        ),
        session=session,
        info=issue.info,
    )


def _prefix(key: Key, length: int, tokens: bytes) -> Prefix:
    return Prefix(length, key, blob_digest(tokens), len(tokens))


def _segments(
    layout: StateLayout,
    path: Sequence[NodeRecord],
    said: Sequence[Provenance],
    points: Sequence[Point],
) -> tuple[Segment, ...]:
    coverage = WindowCoverage.of(layout)
    positions = [point.position for point in points]
    found = []
    for node, provenance in zip(path, said, strict=True):
        blobs = _blobs(node, BlobClass.KV)
        if coverage.needs(node.start, node.end, positions):
            blobs += _blobs(node, BlobClass.WINDOW)
        found.append(Segment(node.start, node.end, node.key, provenance, blobs))
    return tuple(found)


def _kinds(node: NodeRecord, *, is_tip: bool) -> tuple[PointKind, ...]:
    if is_tip and not node.kinds:
        # What can be restored need not be kept for that: as the end it is a point.
        return (PointKind.PROMPT,)
    return tuple(sorted(node.kinds))


def _blobs(node: NodeRecord, blob_class: BlobClass) -> tuple[Blob, ...]:
    ref = node.blob(blob_class)
    return () if ref is None else (Blob(ref.blob_class, ref.digest, ref.size),)
