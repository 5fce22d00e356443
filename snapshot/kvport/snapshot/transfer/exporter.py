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

from kvport.manifest.codec import Codec
from kvport.manifest.digests import ArtifactId, BlobDigest, format_digest
from kvport.manifest.envelope import seal
from kvport.manifest.keys import PublicKey
from kvport.manifest.model import FORMAT_VERSION, Manifest
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.ustar import TOKENS_NAME, TRAILER, header, padding
from kvport.manifest.verify import BlobEntry, VerifiedManifest, verify
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
from kvport.snapshot.transfer.ledger import (
    ArtifactRecord,
    Direction,
    Ledger,
    read_manifest,
)
from kvport.snapshot.transfer.outgoing import compress, encoded, plain
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
        lease: Lease,
    ) -> None:
        """Take over the lease on the path that was signed, with its encoded ids.

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
            StorageError: the ledger could not be written.
        """
        manifest = self.manifest
        record = ArtifactRecord(
            id=self.artifact_id,
            direction=Direction.EXPORTED,
            namespace=self._namespace.id,
            scope=self._namespace.scope,
            model=self._model_name,
            issuer=manifest.issuer.key_id,
            created=manifest.created,
            expires=manifest.expires,
            tokens=manifest.prefix.tokens,
            size=self.size,
            tip=self._tip,
            recorded=now,
            encoder=ENCODER if self._is_encoded else "",
        )
        ledger.keep_exported(record, self._verified.envelope, self._tokens)

    @property
    def _is_encoded(self) -> bool:
        return any(
            isinstance(entry, BlobEntry) and entry.codec is not Codec.NONE
            for entry in self._verified.entries()
        )

    def _pieces(self) -> Iterator[bytes]:
        self._lease.check()
        for entry in self._verified.entries():
            yield header(entry.name, entry.size)
            if isinstance(entry, BlobEntry):
                yield from self._blob(entry)
            elif entry.name == TOKENS_NAME:
                yield self._tokens
            else:
                yield self._verified.envelope
            if gap := padding(entry.size):
                yield gap
        yield TRAILER

    def _blob(self, entry: BlobEntry) -> Iterator[bytes]:
        ref, left = self._refs[entry.digest], entry.size
        if entry.codec is Codec.NONE:
            pieces = plain(self._cache, self._namespace, ref)
        else:
            pieces = encoded(self._cache, self._namespace, ref, entry.layout)
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
        ledger: asked why there is nothing, if so.
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
        manifest = write_manifest(namespace, path, prefix, issue)
        if issue.compress:
            manifest = compress(cache, namespace, manifest, _refs(path))
        envelope = seal(manifest.encode(), [issue.signer])
        verified = _verify_own(envelope, issue.signer.public, issue.now, manifest)
        export = Export(
            cache,
            namespace,
            model_name=issue.model_name,
            verified=verified,
            path=path,
            tokens=prefix,
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
    now: datetime,
) -> Export:
    """Open a kept export again: the same bytes as before.

    Args:
        cache: where its path was.
        ledger: where it was kept.
        artifact: its id.
        scope: the caller's; exports of others do not exist for it.
        key: this node's.
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
    envelope = ledger.envelope(record)
    manifest = read_manifest(envelope)
    namespace = ledger.namespace(record)
    verified = _verify_own(envelope, key, now, manifest)
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
                tokens=ledger.prefix(record, manifest),
                lease=lease,
            )
        except GoneError as error:
            raise ArtifactGoneError("the artifact's state was removed") from error
        undo.pop_all()
    return export


def _refs(path: Sequence[NodeRecord]) -> dict[BlobDigest, BlobRef]:
    return {ref.digest: ref for node in path for ref in node.blobs}


def _verify_own(
    envelope: bytes, key: PublicKey, now: datetime, manifest: Manifest
) -> VerifiedManifest:
    """What goes out passes our own checks first: a defect is found here, not there."""
    return verify(
        envelope,
        trust=TrustList.of([TrustEntry(public_key=key, name="")]),
        now=now,
        local=None,
        own_key=next(iter(manifest.audience), None),
    )
