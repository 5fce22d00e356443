"""Import: a container's bytes become state here, all of it or nothing.

In: chunks, as they arrive. Out: an `ImportResult`, proven by a lookup. On the way:
verify, choose the model, recompute keys, reserve, stage, admit, look up. Any error, and
`abort`, leave cache and ledger as they were but for what was evicted to make room.

Whoever brings state answers for it: the artifact's issuer joins the origins that it
claims, so that nobody's state passes for this node's own.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import ArtifactId
from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, Provenance
from kvport.manifest.limits import ARTIFACT_BYTES
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.signed import SealedArtifact, SignedManifest
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.manifest.trust import TrustList
from kvport.manifest.verified import VerifiedManifest, VerifiedNode
from kvport.manifest.verify import open_artifact
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Admitted, BlobRef, NodeRecord, Selection
from kvport.snapshot.errors import (
    GoneError,
    StorageError,
    TooLargeError,
    UnknownModelError,
)
from kvport.snapshot.transfer.container import Accepted, ContainerReader
from kvport.snapshot.transfer.ledger import ArtifactRecord, Direction, Ledger, Papers
from kvport.snapshot.transfer.matching import LocalModel, fit
from kvport.snapshot.transfer.sessions import Mark
from kvport.snapshot.transfer.staging import Staging

__all__ = ["Import", "ImportResult", "LocalModel"]

_OWNER: Final = "import"


@attrs.frozen
class ImportResult:
    """What an import did.

    Attributes:
        artifact_id: digest of the manifest's payload.
        model: name of the model here that the state is for.
        restored_tokens: of the prefix, found by a lookup after admission.
        admitted_segments: segments that are new.
        present_segments: segments that were there already.
    """

    artifact_id: ArtifactId
    model: str
    restored_tokens: int
    admitted_segments: int
    present_segments: int


@attrs.frozen
class _Accepted:
    verified: VerifiedManifest
    model: LocalModel
    staging: Staging
    mark: Mark


class Import:
    """One import; end it with `finish`, or with `abort`.

    Calls block on the disk. They may come from any thread, one waits for another.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        ledger: Ledger,
        models: Sequence[LocalModel],
        trust: Callable[[], TrustList],
        local: KeyId,
        recipient: Callable[[], RecipientKey],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        max_bytes: int = ARTIFACT_BYTES,
    ) -> None:
        """Begin an import; nothing is touched before a signature was verified.

        Args:
            cache: where the state goes.
            ledger: where the admission is recorded.
            models: that it may be for, each with the namespace of the caller's scope.
            trust: reads the trust list, as it is when the envelope has arrived.
            local: this node's key.
            recipient: reads the key that opens what is sealed for this node.
            now: the wall clock, aware.
            max_bytes: cap on the container's size.
        """
        self._cache = cache
        self._ledger = ledger
        self._models = models
        self._trust = trust
        self._local: Final = local
        self._recipient = recipient
        self._now = now
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._reader: ContainerReader | None = ContainerReader(self)
        self._accepted: _Accepted | None = None

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the container.

        Raises:
            CacheAbsentError: the cache's volume went away; likewise.
            KvportError: a subclass; the import has been aborted.
        """
        with self._lock:
            reader = self._open_reader()
            try:
                with self._at_cache():
                    reader.feed(chunk)
            except BaseException:
                self._discard()
                raise

    def finish(self) -> ImportResult:
        """Say that there are no more bytes: admit, and prove it.

        Raises:
            GoneError: the state was cleared before it could be looked up.
            CacheAbsentError: the cache's volume went away; the import has been aborted.
            KvportError: another subclass; the import has been aborted.
        """
        with self._lock:
            reader = self._open_reader()
            try:
                with self._at_cache():
                    reader.finish()
                    return self._admit()
            finally:
                self._discard()

    def abort(self) -> None:
        """Remove what is staged; does nothing after the end."""
        with self._lock:
            self._discard()

    @contextmanager
    def _at_cache(self) -> Iterator[None]:
        """Tell a volume that is gone from one that refused something."""
        try:
            yield
        except StorageError:
            self._cache.check()
            raise

    def _open_reader(self) -> ContainerReader:
        if self._reader is None:
            raise RuntimeError("the import has ended")
        return self._reader

    def _discard(self) -> None:
        self._reader = None
        if self._accepted is not None:
            # What stays behind on a failing volume is swept at the next start; the
            # error that led here says more.
            with suppress(KvportError):
                self._accepted.staging.discard()

    def accept(self, envelope: bytes) -> Accepted | SealedArtifact:
        """See `Acceptor`: verify, and choose the model."""
        opened = open_artifact(
            envelope, trust=self._trust(), now=self._now(), own_key=self._local
        )
        # Also of what is sealed: as yet nothing of it was read.
        if not self._models:
            raise UnknownModelError("no model with a cache is served here")
        if isinstance(opened, SealedArtifact):
            self._check_size(opened.size)
            return opened
        return self._begin(opened)

    def open(self, sealed: SealedArtifact, private: bytes) -> Accepted:
        """See `Acceptor`: go on with what is inside."""
        return self._begin(sealed.open(private, self._recipient()))

    def _begin(self, signed: SignedManifest) -> Accepted:
        verified, model = fit(self._models, signed)
        # Again at the admission; here before all of it has come.
        mark = Mark.of(verified.manifest, verified.artifact_id)
        self._ledger.check_session(mark)
        self._check_size(verified.size)
        staging = Staging(self._cache, model.namespace, secrets.token_hex(16))
        self._accepted = _Accepted(verified, model, staging, mark)
        return verified, staging

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLargeError(f"the artifact is above {self._max_bytes} bytes")

    def _admit(self) -> ImportResult:
        accepted = self._accepted
        if accepted is None or (room := accepted.staging.reservation) is None:
            raise RuntimeError("a whole container without a path")
        verified, staging = accepted.verified, accepted.staging
        issuer = verified.manifest.terms.issuer.key_id
        nodes = _records(staging.nodes, staging.tokens, issuer)
        staging.flush()
        namespace = accepted.model.namespace
        papers = Papers(
            verified.envelope, _inside(verified), identity=_admitted_as(verified)
        )
        record = self._record(accepted)
        with self._ledger.admission(record, papers, accepted.mark):
            admitted = self._cache.admit(namespace, nodes, staging.files, room)
        # The proof waits for what others store: that must not evict it.
        with self._cache.lease(namespace, nodes[-1].id, _OWNER):
            return self._prove(accepted, admitted)

    def _prove(self, accepted: _Accepted, admitted: Admitted) -> ImportResult:
        """Look the prefix up, on the artifact's own path."""
        verified, nodes = accepted.verified, accepted.staging.nodes
        selection = Selection(
            limit=verified.manifest.prefix.tokens,
            local=self._local,
            within=frozenset(node.id for node in nodes),
        )
        tokens = accepted.staging.tokens
        match = self._cache.match(
            accepted.model.namespace, tokens, selection, count=False
        )
        restored = match.position if match else 0
        if restored < verified.manifest.prefix.tokens:
            raise GoneError("the state was removed right after it was admitted")
        return ImportResult(
            artifact_id=verified.artifact_id,
            model=accepted.model.name,
            restored_tokens=restored,
            admitted_segments=admitted.admitted_segments,
            present_segments=admitted.present_segments,
        )

    def _record(self, accepted: _Accepted) -> ArtifactRecord:
        verified, model = accepted.verified, accepted.model
        manifest = verified.manifest
        return ArtifactRecord(
            id=verified.artifact_id,
            direction=Direction.ADMITTED,
            namespace=model.namespace.id,
            scope=model.namespace.scope,
            model=model.name,
            issuer=manifest.terms.issuer.key_id,
            origins=manifest.origins,
            created=manifest.terms.created,
            expires=manifest.terms.expires,
            tokens=manifest.prefix.tokens,
            size=verified.size,
            tip=accepted.staging.nodes[-1].id,
            recorded=self._now(),
        )


def _records(
    nodes: Sequence[VerifiedNode], tokens: bytes, issuer: KeyId
) -> list[NodeRecord]:
    return [
        NodeRecord(
            id=node.id,
            parent=node.parent,
            start=node.start,
            end=node.end,
            key=node.key,
            tokens=tokens[node.start * TOKEN_SIZE : node.end * TOKEN_SIZE],
            blobs=tuple(
                BlobRef(blob.blob_class, blob.digest, blob.size)
                for blob in node.blobs.values()
            ),
            kinds=frozenset(node.kinds),
            attestations=(_brought_by(issuer, node.provenance),),
        )
        for node in nodes
    ]


def _inside(verified: VerifiedManifest) -> bytes:
    """The manifest of a sealed artifact: without its key it is not found again."""
    return verified.manifest.encode() if verified.is_sealed else b""


def _admitted_as(verified: VerifiedManifest) -> bytes:
    if verified.admitted_as == verified.manifest.identity:
        return b""
    return canonical_dumps(verified.admitted_as.to_json())


def _brought_by(issuer: KeyId, said: Provenance) -> Provenance:
    return attrs.evolve(said, origins=said.origins | {issuer})
