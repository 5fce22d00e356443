"""The ledger: which artifacts went out and came in, and which state went away.

In: facts. Out: facts. It lies in the home, is never rebuilt, and is not cleared with
the cache.

Admission spans two databases, so that it has an order: the ledger's row with status
`intent`; the index's commit, which is the admission; the row's status `admitted`. A
crash in between leaves an intent, and `reconcile` asks the cache which it was.

Keys of removed nodes are kept to tell an evicted prefix from one that was never
computed. They are bounded, and kept per namespace: no scope learns of another's.
"""

import contextlib
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import attrs
import structlog

from kvport.manifest.canonical import strict_loads
from kvport.manifest.digests import ArtifactId, Key, blob_digest
from kvport.manifest.envelope import open_envelope
from kvport.manifest.identity import KeyId
from kvport.manifest.model import Manifest
from kvport.manifest.nodes import NodeId
from kvport.manifest.timestamps import format_time, parse_time
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace, Removed
from kvport.snapshot.cache.schema import storage_errors
from kvport.snapshot.errors import GoneError, StorageError
from kvport.snapshot.transfer.ledger_tables import connect

REMOVED_ROWS: Final = 100_000

_COLUMNS: Final = (
    "id", "direction", "namespace", "scope", "model", "issuer",
    "created", "expires", "tokens", "size", "tip", "recorded", "encoder",
)  # fmt: skip
_TIMES: Final = ("created", "expires", "recorded")
_PUT: Final = """
INSERT OR REPLACE INTO artifact (id, direction, namespace, scope, model, issuer,
    created, expires, tokens, size, tip, recorded, encoder, envelope, prefix, status)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_FORGET: Final = "DELETE FROM artifact WHERE id = ? AND direction = ? AND scope = ?"
_SETTLE: Final = """
UPDATE artifact SET status = 'admitted' WHERE id = ? AND direction = ? AND scope = ?"""
_ENVELOPE: Final = """
SELECT envelope FROM artifact WHERE id = ? AND direction = ? AND scope = ?"""
_PREFIX: Final = """
SELECT prefix FROM artifact WHERE id = ? AND direction = ? AND scope = ?"""

_log = structlog.get_logger(__name__)


class Direction(StrEnum):
    """Which way an artifact went."""

    EXPORTED = "exported"
    ADMITTED = "admitted"


class _Status(StrEnum):
    INTENT = "intent"
    ADMITTED = "admitted"


@attrs.frozen(kw_only=True)
class ArtifactRecord:
    """One artifact that went out or came in.

    Attributes:
        id: digest of its payload.
        direction: which way it went.
        namespace: id of the namespace that its state is in.
        scope: that namespace's scope.
        model: name under which the model was served.
        issuer: key that issued it.
        created: as signed.
        expires: as signed; admitted state does not expire with it.
        tokens: length of the prefix.
        size: bytes of the container.
        tip: last node of its path.
        recorded: when it went, by this machine's clock.
        encoder: version of what compressed it, empty if it is not compressed or was not
            made here.
    """

    id: ArtifactId
    direction: Direction
    namespace: str
    scope: str
    model: str
    issuer: KeyId
    created: datetime
    expires: datetime
    tokens: int
    size: int
    tip: NodeId
    recorded: datetime
    encoder: str = ""


class Ledger:
    """`state.sqlite`; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Open the ledger, or make it.

        Raises:
            StorageError: it cannot be read, is in use, or is of another format.
        """
        self._lock = threading.RLock()
        self._admissions = threading.Lock()
        self._connection = connect(path)
        self._namespaces: dict[str, Namespace] = {}

    def close(self) -> None:
        """Close the database."""
        with self._lock, storage_errors():
            self._connection.close()

    # Artifacts.

    def keep_exported(
        self, record: ArtifactRecord, envelope: bytes, tokens: bytes
    ) -> None:
        """Record an export, so that it can be asked for again until it expires.

        Exports that have expired by now are forgotten.

        Args:
            record: what it is.
            envelope: its signed bytes.
            tokens: encoded ids of its prefix, which the cache does not keep together.

        Raises:
            StorageError: the ledger could not be written.
        """
        with self._transaction():
            self._all(
                "DELETE FROM artifact WHERE direction = ? AND expires <= ?",
                (Direction.EXPORTED, format_time(record.recorded)),
            )
            self._put(record, envelope, _Status.ADMITTED, zlib.compress(tokens))

    @contextlib.contextmanager
    def admission(self, record: ArtifactRecord, envelope: bytes) -> Iterator[None]:
        """Surround the index's commit: an intent before, `admitted` after.

        One at a time, since two imports of one artifact share a row.

        Raises:
            StorageError: the ledger could not be written.
        """
        with self._admissions:
            before = self.find(record.id, record.direction, scope=record.scope)
            if before is None:
                with self._transaction():
                    self._put(record, envelope, _Status.INTENT)
            try:
                yield
            except BaseException:
                if before is None:
                    self._forget(record)
                raise
            with self._transaction():
                self._put(record, envelope, _Status.ADMITTED)

    def artifacts(self, scope: str | None = None) -> list[ArtifactRecord]:
        """Artifacts that went out or came in, newest first; of one scope, or all.

        Raises:
            StorageError: the ledger could not be read.
        """
        return self._select("? IS NULL OR scope = ?", (scope, scope))

    def find(
        self, artifact: ArtifactId, direction: Direction, *, scope: str
    ) -> ArtifactRecord | None:
        """The record of an artifact in a scope, None if there is none.

        Raises:
            StorageError: the ledger could not be read.
        """
        found = self._select(
            "id = ? AND direction = ? AND scope = ?", (artifact, direction, scope)
        )
        return found[0] if found else None

    def envelope(self, record: ArtifactRecord) -> bytes:
        """The signed bytes of an artifact, verified before it was recorded.

        Raises:
            StorageError: the ledger could not be read, or the record went.
        """
        found = self._all(_ENVELOPE, _name(record))
        if not found:
            raise StorageError("the artifact's record went")
        return bytes(found[0][0])

    def prefix(self, record: ArtifactRecord, manifest: Manifest) -> bytes:
        """Encoded ids of a kept export's prefix, as its manifest has signed them.

        Raises:
            StorageError: the ledger could not be read, or is damaged.
        """
        found = self._all(_PREFIX, _name(record))
        try:
            tokens = zlib.decompressobj().decompress(found[0][0], manifest.prefix.size)
        except (IndexError, TypeError, zlib.error) as error:
            raise StorageError("the artifact's tokens cannot be read") from error
        if blob_digest(tokens) != manifest.prefix.digest:
            raise StorageError("the artifact's tokens are damaged")
        return tokens

    def namespace(self, record: ArtifactRecord) -> Namespace:
        """The namespace that an artifact's state is in.

        Raises:
            StorageError: the ledger could not be read, or the record went.
        """
        # A manifest takes time to read, and artifacts of one namespace are many.
        if (found := self._namespaces.get(record.namespace)) is None:
            manifest = read_manifest(self.envelope(record))
            found = Namespace.of(manifest.identity, record.scope, manifest.block_size)
            self._namespaces[record.namespace] = found
        return found

    def reconcile(self, cache: Cache) -> None:
        """Settle intents that a crash left: admitted if the cache has their tip.

        Raises:
            StorageError: the ledger or the index could not be read or written.
        """
        for record in self._select("TRUE", (), _Status.INTENT):
            try:
                cache.path(self.namespace(record), record.tip)
            except GoneError:
                self._forget(record)
            else:
                with self._transaction():
                    self._all(_SETTLE, _name(record))

    # What went away.

    def record_removed(self, removed: Sequence[Removed]) -> None:
        """Remember the keys of nodes that went; the oldest beyond a bound are dropped.

        Never raises, since the cache calls it while it makes room: what is lost is the
        answer to why something is not there.
        """
        at = format_time(datetime.now(UTC))
        try:
            with self._transaction():
                self._connection.executemany(
                    "INSERT OR REPLACE INTO removed (namespace, key, reason, at)"
                    " VALUES (?, ?, ?, ?)",
                    [(node.namespace, node.key, node.reason, at) for node in removed],
                )
                self._all(
                    "DELETE FROM removed WHERE n <= (SELECT max(n) FROM removed) - ?",
                    (REMOVED_ROWS,),
                )
        except StorageError as error:
            _log.warning("ledger_removed_lost", count=len(removed), reason=error.code)

    def was_removed(self, namespace: str, keys: Iterable[Key]) -> str | None:
        """Why the longest of these prefixes went, None if none of them did.

        Args:
            namespace: id of the namespace.
            keys: by ascending length.

        Raises:
            StorageError: the ledger could not be read.
        """
        for key in reversed(list(keys)):
            found = self._all(
                "SELECT reason FROM removed WHERE namespace = ? AND key = ?",
                (namespace, key),
            )
            if found:
                return str(found[0][0])
        return None

    # Internals.

    def _put(
        self,
        record: ArtifactRecord,
        envelope: bytes,
        status: _Status,
        prefix: bytes = b"",
    ) -> None:
        values = attrs.asdict(record)
        for name in _TIMES:
            values[name] = format_time(values[name])
        columns = (values[name] for name in _COLUMNS)
        self._all(_PUT, (*columns, envelope, prefix, status))

    def _forget(self, record: ArtifactRecord) -> None:
        with self._transaction():
            self._all(_FORGET, _name(record))

    def _select(
        self,
        condition: str,
        parameters: tuple[Any, ...],
        status: _Status = _Status.ADMITTED,
    ) -> list[ArtifactRecord]:
        rows = self._all(
            f"SELECT {', '.join(_COLUMNS)} FROM artifact"  # noqa: S608 - texts of this module
            f" WHERE status = ? AND ({condition}) ORDER BY recorded DESC, id",
            (status, *parameters),
        )
        return [_record(row) for row in rows]

    def _all(self, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
        with self._lock, storage_errors():
            return self._connection.execute(sql, parameters).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, storage_errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield


def read_manifest(envelope: bytes) -> Manifest:
    """The manifest of an envelope that was verified before it was recorded."""
    return Manifest.from_json(strict_loads(open_envelope(envelope).payload))


def _name(record: ArtifactRecord) -> tuple[str, ...]:
    return (record.id, record.direction, record.scope)


def _record(row: tuple[Any, ...]) -> ArtifactRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in _TIMES:
        values[name] = parse_time(values[name])
    return ArtifactRecord(**values | {"direction": Direction(values["direction"])})
