"""Export: the longest restorable prefix of some tokens, as a signed container.

In: tokens. Out: a stream of bytes whose exact length is known before the first one. The
path is leased from opening until the stream has ended, so that eviction passes it by;
a client that stalls for too long finds that its lease ran out, and the stream ends.
Blobs are read in pieces and checked while they are sent, so that a damaged one never
leaves whole, and ends the stream. Compressed ones are encoded twice: for their sizes,
which are signed, and when they are sent.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from kvport.manifest.arithmetic import check_arithmetic
from kvport.manifest.codec import Codec
from kvport.manifest.digests import ArtifactId, BlobDigest, format_digest
from kvport.manifest.envelope import sign_payload
from kvport.manifest.errors import DigestMismatchError
from kvport.manifest.keys import PublicKey
from kvport.manifest.model import FORMAT_VERSION, Manifest, Session
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.ustar import (
    ENVELOPE_NAME,
    PRIVATE_NAME,
    TOKENS_NAME,
    TRAILER,
    header,
    padding,
)
from kvport.manifest.verified import BlobEntry, VerifiedManifest
from kvport.manifest.verify import open_artifact
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import BlobRef, Namespace, NodeRecord, Selection
from kvport.snapshot.errors import (
    ArtifactGoneError,
    ArtifactUnknownError,
    GoneError,
)
from kvport.snapshot.transfer.absence import why_nothing
from kvport.snapshot.transfer.codec import ENCODER
from kvport.snapshot.transfer.issue import Issue, preferred, write_manifest
from kvport.snapshot.transfer.ledger import ArtifactRecord, Direction, Ledger, Papers
from kvport.snapshot.transfer.outgoing import compress, read_blob
from kvport.snapshot.transfer.sealing import (
    Documents,
    MessageKeys,
    seal_blob,
    seal_documents,
    seal_export,
)
from kvport.snapshot.transfer.tail import lease_whole_path

__all__ = ["Export", "Issue", "open_export", "reopen_export"]

_OWNER: Final = "export"
STALLED: Final = 300
"""Seconds that a client may take for one piece of the stream."""


class Export:
    """An open export; end it by reading `stream` to its end, or with `close`.

    Attributes:
        artifact_id: digest of the manifest's payload.
        manifest: what was signed.
        restorable_tokens: tokens that an import restores.
        size: exact bytes of the container.
    """

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        *,
        model_name: str,
        verified: VerifiedManifest,
        path: Sequence[NodeRecord],
        tokens: bytes,
        documents: Documents | None,
        lease: Lease,
    ) -> None:
        """Take over the lease on the path that was signed, with its encoded ids.

        `documents` are those of a sealed artifact.

        Raises:
            GoneError: a blob that was signed is not on the path any more.
        """
        self._refs = _refs(path)
        if not all(
            entry.digest in self._refs
            for entry in verified.entries()
            if isinstance(entry, BlobEntry)
        ):
            raise GoneError("a blob of the path was removed")
        self._tokens = tokens
        self._documents = documents
        self._cache = cache
        self._namespace = namespace
        self._model_name = model_name
        self._verified = verified
        self._lease = lease
        self._tip = lease.tip
        self.artifact_id: Final[ArtifactId] = verified.artifact_id
        self.manifest: Final[Manifest] = verified.manifest
        self.restorable_tokens: Final[int] = verified.manifest.prefix.tokens
        self.size: Final[int] = verified.size

    def describe(self) -> dict[str, Any]:
        """What the artifact is, as JSON."""
        manifest = self.manifest
        return {
            "artifact_id": self.artifact_id,
            "restorable_tokens": self.restorable_tokens,
            "size_bytes": self.size,
            "format_version": FORMAT_VERSION,
            "model": self._model_name,
            "quant": manifest.identity.quant,
            "engine_version": f"mlx-lm {manifest.identity.mlx_lm}",
            "prefix_digest": format_digest(manifest.prefix.digest),
            "session": attrs.asdict(manifest.session),
        }

    def stream(self) -> Iterator[bytes]:
        """The container's bytes, in pieces of a few MiB at most.

        Raises:
            DamagedError: a blob is damaged; what was sent is not an artifact.
            GoneError: the export was closed, the client took more than `STALLED`
                seconds for a piece, or a blob was removed in spite of the lease.
        """
        try:
            for piece in self._pieces():
                # After it was read: what was not held any more is not sent.
                self._lease.renew(STALLED)
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Let the path go; a second time does nothing."""
        self._lease.release()

    def keep(self, ledger: Ledger, now: datetime) -> None:
        """Record it, so that `reopen_export` opens it again.

        Raises:
            GoneError: its path was removed by design since.
            RevokedKeyError: some of it came from a key that was revoked meanwhile.
            StorageError: the ledger could not be written.
        """
        self._lease.check()
        manifest = self.manifest
        record = ArtifactRecord(
            id=self.artifact_id,
            direction=Direction.EXPORTED,
            namespace=self._namespace.id,
            scope=self._namespace.scope,
            model=self._model_name,
            issuer=manifest.terms.issuer.key_id,
            origins=manifest.origins,
            created=manifest.terms.created,
            expires=manifest.terms.expires,
            tokens=manifest.prefix.tokens,
            size=self.size,
            tip=self._tip,
            recorded=now,
            encoder=ENCODER if self._is_encoded else "",
        )
        papers = Papers(self._verified.envelope)
        if self._documents is not None:
            papers = attrs.evolve(
                papers,
                inside=manifest.encode(),
                content_key=self._documents.content_key,
            )
        ledger.keep_exported(record, papers, self._tokens)

    @property
    def _is_encoded(self) -> bool:
        return any(
            isinstance(entry, BlobEntry) and entry.codec is not Codec.NONE
            for entry in self._verified.entries()
        )

    def _pieces(self) -> Iterator[bytes]:
        self._lease.check()
        documents = {ENVELOPE_NAME: self._verified.envelope, TOKENS_NAME: self._tokens}
        if sealed := self._documents:
            documents |= {PRIVATE_NAME: sealed.private, TOKENS_NAME: sealed.tokens}
        for entry in self._verified.entries():
            yield header(entry.name, entry.size)
            if isinstance(entry, BlobEntry):
                yield from self._blob(entry)
            else:
                yield documents[entry.name]
            if gap := padding(entry.size):
                yield gap
        yield TRAILER

    def _blob(self, entry: BlobEntry) -> Iterator[bytes]:
        left = entry.size
        pieces = read_blob(self._cache, self._namespace, self._refs, entry)
        if entry.seal is not None:
            pieces = seal_blob(pieces, entry.seal.key)
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                break
            yield piece
        if left:
            raise GoneError("a blob is not encoded as it was when it was signed")


def open_export(
    cache: Cache, ledger: Ledger, namespace: Namespace, tokens: bytes, issue: Issue
) -> Export:
    """Export the longest prefix of `tokens` that can be restored.

    Args:
        cache: what was appended to it before is seen.
        ledger: counts the sessions, and is asked why there is nothing, if so.
        namespace: whose state is exported.
        tokens: encoded ids.
        issue: who signs, and for whom.

    Raises:
        NothingRestorableError: a subclass says why.
        GoneError: the path was removed while it was being opened.
        DamagedError: a blob was found damaged while it was encoded.
        LimitExceededError: it is more than an artifact may hold.
        KvportError: as of `lease_whole_path`.
    """
    limit = len(tokens) // TOKEN_SIZE
    chosen = Selection(limit=limit, local=issue.issuer)
    match = cache.match(namespace, tokens, chosen, count=False)
    if match is None:
        raise why_nothing(cache, ledger, namespace, tokens)
    lease = lease_whole_path(
        cache,
        namespace,
        tokens,
        match,
        provenance=preferred(match.nodes[-1], issue.issuer),
        owner=_OWNER,
    )
    with contextlib.ExitStack() as undo:
        undo.callback(lease.release)
        path = cache.path(namespace, lease.tip)
        prefix = tokens[: path[-1].end * TOKEN_SIZE]
        refs = _refs(path)
        session = Session()
        if issue.session:
            # Durable before anything leaves; one that is not used is left out.
            sequence = ledger.next_sequence(namespace.scope, issue.session)
            session = Session(issue.session, sequence)
        manifest = write_manifest(namespace, path, prefix, issue, session)
        if issue.compress:
            manifest = compress(cache, namespace, manifest, refs)
        documents = None
        if issue.recipients:
            envelope, documents = seal_export(
                manifest,
                prefix,
                lambda blob: read_blob(cache, namespace, refs, blob),
                keys=MessageKeys(issue.sealing_secret, namespace),
                recipients=issue.recipients,
                signer=issue.signer,
            )
        else:
            envelope = sign_payload(manifest.encode(), [issue.signer])
        verified = _verify_own(
            envelope, issue.signer.public, issue.now, manifest, documents
        )
        export = Export(
            cache,
            namespace,
            model_name=issue.model_name,
            verified=verified,
            path=path,
            tokens=prefix,
            documents=documents,
            lease=lease,
        )
        undo.pop_all()
    return export


def reopen_export(
    cache: Cache,
    ledger: Ledger,
    artifact: ArtifactId,
    *,
    scope: str,
    key: PublicKey,
    sealing_secret: bytes,
    now: datetime,
) -> Export:
    """Open a kept export again: the same bytes as before.

    Args:
        cache: where its path was.
        ledger: where it was kept.
        artifact: its id.
        scope: the caller's; exports of others do not exist for it.
        key: this node's.
        sealing_secret: this home's.
        now: aware.

    Raises:
        ArtifactUnknownError: it was not kept.
        ArtifactGoneError: some of its state was removed since, or its key was replaced,
            or it was compressed by another version of the library.
        ExpiredError: nobody could import it any more.
    """
    record = ledger.find(artifact, Direction.EXPORTED, scope=scope)
    if record is None:
        raise ArtifactUnknownError("no export of this id is kept")
    if record.issuer != key.key_id:
        raise ArtifactGoneError("the artifact was signed with a key that was replaced")
    if record.encoder not in {"", ENCODER}:
        raise ArtifactGoneError("the artifact was compressed by another version")
    papers = ledger.papers(record)
    manifest = papers.manifest()
    namespace = ledger.namespace(record)
    tokens = ledger.prefix(record, manifest)
    documents = None
    if papers.content_key:
        keys = MessageKeys(sealing_secret, namespace)
        part = keys.private_part(manifest, check_arithmetic(manifest))
        documents = seal_documents(part, tokens, papers.content_key)
    try:
        verified = _verify_own(papers.envelope, key, now, manifest, documents)
    except DigestMismatchError as error:
        raise ArtifactGoneError("the artifact's sealing secret was replaced") from error
    with contextlib.ExitStack() as undo:
        try:
            lease = cache.lease(namespace, record.tip, _OWNER)
            undo.callback(lease.release)
            path = cache.path(namespace, record.tip)
            export = Export(
                cache,
                namespace,
                model_name=record.model,
                verified=verified,
                path=path,
                tokens=tokens,
                documents=documents,
                lease=lease,
            )
        except GoneError as error:
            raise ArtifactGoneError("the artifact's state was removed") from error
        undo.pop_all()
    return export


def _refs(path: Sequence[NodeRecord]) -> dict[BlobDigest, BlobRef]:
    return {ref.digest: ref for node in path for ref in node.blobs}


def _verify_own(
    envelope: bytes,
    key: PublicKey,
    now: datetime,
    manifest: Manifest,
    documents: Documents | None,
) -> VerifiedManifest:
    """What goes out passes our own checks first: a defect is found here, not there."""
    opened = open_artifact(
        envelope,
        trust=TrustList.of([TrustEntry(public_key=key, name="")]),
        now=now,
        own_key=next(iter(manifest.terms.audience), None),
    )
    if isinstance(opened, SealedArtifact):
        if documents is None:
            raise RuntimeError("a sealed artifact without its documents")
        opened = opened.open_with(documents.private, documents.content_key)
    return opened.fit(None)
