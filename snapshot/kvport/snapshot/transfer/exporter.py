"""Export: the longest restorable prefix of some tokens, as a signed container.

In: tokens. Out: a stream of bytes whose exact length is known before the first one. The
path is leased from opening until the stream has ended, so that eviction passes it by.
Blobs are read in pieces and checked while they are sent; a piece goes out only once the
next one was read, so that a damaged blob never leaves whole, and ends the stream.
"""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from io import FileIO
from typing import Any, Final

from blake3 import blake3

from kvport.manifest.digests import ArtifactId, format_digest
from kvport.manifest.envelope import seal
from kvport.manifest.keys import PublicKey
from kvport.manifest.limits import MIB
from kvport.manifest.model import FORMAT_VERSION, Manifest
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.ustar import TOKENS_NAME, TRAILER, header, padding
from kvport.manifest.verify import BlobEntry, VerifiedManifest, verify
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import BlobRef, Namespace, Selection
from kvport.snapshot.errors import (
    ArtifactGoneError,
    ArtifactUnknownError,
    DamagedError,
    GoneError,
)
from kvport.snapshot.transfer.absence import why_nothing
from kvport.snapshot.transfer.issue import Issue, preferred, write_manifest
from kvport.snapshot.transfer.ledger import (
    ArtifactRecord,
    Direction,
    Ledger,
    read_manifest,
)
from kvport.snapshot.transfer.tail import lease_whole_path

__all__ = ["Export", "Issue", "open_export", "reopen_export"]

PIECE_BYTES: Final = MIB
_OWNER: Final = "export"


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
        model_name: str,
        verified: VerifiedManifest,
        lease: Lease,
    ) -> None:
        """Take over the lease on the path that was signed."""
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
        """The container's bytes, in pieces of at most `PIECE_BYTES`.

        Raises:
            DamagedError: a blob is damaged; what was sent is not an artifact.
            GoneError: the export was closed.
        """
        try:
            if self._lease.tip != self._tip:
                raise GoneError("the export was closed")
            path = self._cache.path(self._namespace, self._tip)
            refs = {ref.digest: ref for node in path for ref in node.blobs}
            for entry in self._verified.entries():
                yield header(entry.name, entry.size)
                if isinstance(entry, BlobEntry):
                    yield from self._blob(refs[entry.digest])
                elif entry.name == TOKENS_NAME:
                    yield b"".join(node.tokens for node in path)
                else:
                    yield self._verified.envelope
                if gap := padding(entry.size):
                    yield gap
            yield TRAILER
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
        )
        ledger.keep_exported(record, self._verified.envelope)

    def _blob(self, ref: BlobRef) -> Iterator[bytes]:
        hasher, held, left = blake3(), b"", ref.size
        with self._cache.open_blob(self._namespace, ref) as file:
            while left and (piece := _read(file, min(left, PIECE_BYTES))):
                if held:
                    yield held
                hasher.update(piece)
                held, left = piece, left - len(piece)
        if left or hasher.digest() != ref.digest:
            self._cache.report_damage(self._namespace, ref)
            raise DamagedError("a stored blob was found damaged while it was sent")
        yield held


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
        LimitExceededError: it is more than an artifact may hold.
        KvportError: as of `lease_whole_path`.
    """
    limit = len(tokens) // TOKEN_SIZE
    match = cache.match(namespace, tokens, Selection(limit=limit, local=issue.issuer))
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
        envelope = seal(manifest.encode(), [issue.signer])
        verified = _verify_own(envelope, issue.signer.public, issue.now, manifest)
        undo.pop_all()
    return Export(cache, namespace, issue.model_name, verified, lease)


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
        ArtifactGoneError: its path was removed since, or its key was replaced.
        ExpiredError: nobody could import it any more.
    """
    record = ledger.find(artifact, Direction.EXPORTED, scope=scope)
    if record is None:
        raise ArtifactUnknownError("no export of this id is kept")
    if record.issuer != key.key_id:
        raise ArtifactGoneError("the artifact was signed with a key that was replaced")
    envelope = ledger.envelope(record)
    manifest = read_manifest(envelope)
    namespace = ledger.namespace(record)
    try:
        lease = cache.lease(namespace, record.tip, _OWNER)
    except GoneError as error:
        raise ArtifactGoneError("the artifact's state was removed") from error
    with contextlib.ExitStack() as undo:
        undo.callback(lease.release)
        verified = _verify_own(envelope, key, now, manifest)
        undo.pop_all()
    return Export(cache, namespace, record.model, verified, lease)


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


def _read(file: FileIO, size: int) -> bytes:
    """The next bytes; none at the end, or where the medium fails."""
    try:
        return file.read(size)
    except OSError:
        return b""
