"""The ledger: which artifacts went out and came in, and which state went away.

In: facts. Out: facts. It lies in the home, is never rebuilt, and is not cleared with
the cache.

Admission spans two databases, so that it has an order: the ledger's row with status
`intent`; the index's commit, which is the admission; the row's status `admitted`. A
crash in between leaves an intent, and `reconcile` asks the cache which it was. How far
a session has come (sessions.py) is stored with the last step, and never forgotten.

Keys of removed nodes are kept to tell an evicted prefix from one that was never
computed. They are bounded, and kept per namespace: no scope learns of another's.
"""

import contextlib
import json
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import attrs
import structlog

from kvport.manifest.digests import ArtifactId, Key, blob_digest
from kvport.manifest.errors import RevokedKeyError
from kvport.manifest.identity import KeyId
from kvport.manifest.model import Manifest
from kvport.manifest.timestamps import format_time, parse_time
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace, Removed
from kvport.snapshot.cache.schema import storage_errors
from kvport.snapshot.errors import GoneError, StorageError
from kvport.snapshot.transfer.ledger_records import ArtifactRecord, Direction, Papers
from kvport.snapshot.transfer.ledger_tables import connect
from kvport.snapshot.transfer.sessions import (
    Mark,
    check_mark,
    next_sequence,
    raise_mark,
)

__all__ = ["ArtifactRecord", "Direction", "Ledger", "Papers"]

REMOVED_ROWS: Final = 100_000

_COLUMNS: Final = (
    "id", "direction", "namespace", "scope", "model", "issuer", "origins",
    "created", "expires", "tokens", "size", "tip", "recorded", "encoder",
)  # fmt: skip
_TIMES: Final = ("created", "expires", "recorded")
_PUT: Final = """
INSERT OR REPLACE INTO artifact (id, direction, namespace, scope, model, issuer,
    origins, created, expires, tokens, size, tip, recorded, encoder, envelope, inside,
    content_key, identity, prefix, status)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_FORGET: Final = "DELETE FROM artifact WHERE id = ? AND direction = ? AND scope = ?"
_SETTLE: Final = """
UPDATE artifact SET status = 'admitted' WHERE id = ? AND direction = ? AND scope = ?"""
_PAPERS: Final = """
SELECT envelope, inside, content_key, identity FROM artifact
WHERE id = ? AND direction = ? AND scope = ?"""
_PURGE: Final = """
DELETE FROM artifact WHERE EXISTS
    (SELECT 1 FROM json_each(?) WHERE instr(origins, value) OR issuer = value)
RETURNING id"""
_PREFIX: Final = """
SELECT prefix FROM artifact WHERE id = ? AND direction = ? AND scope = ?"""

_log = structlog.get_logger(__name__)


class _Status(StrEnum):
    INTENT = "intent"
    ADMITTED = "admitted"


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
        self._barred: frozenset[KeyId] = frozenset()

    def close(self) -> None:
        """Close the database."""
        with self._lock, storage_errors():
            self._connection.close()

    # Artifacts.

    def keep_exported(
        self, record: ArtifactRecord, papers: Papers, tokens: bytes
    ) -> None:
        """Record an export, so that it can be asked for again until it expires.

        Exports that have expired by now are forgotten.

        Args:
            record: what it is.
            papers: its signed bytes.
            tokens: encoded ids of its prefix, which the cache does not keep together.

        Raises:
            StorageError: the ledger could not be written.
        """
        with self._transaction():
            self._all(
                "DELETE FROM artifact WHERE direction = ? AND expires <= ?",
                (Direction.EXPORTED, format_time(record.recorded)),
            )
            self._put(record, papers, _Status.ADMITTED, zlib.compress(tokens))

    @contextlib.contextmanager
    def admission(
        self, record: ArtifactRecord, papers: Papers, mark: Mark | None = None
    ) -> Iterator[None]:
        """Surround the index's commit: an intent before, `admitted` after.

        One at a time, since two imports of one artifact share a row, and a session only
        goes forward. Its mark is raised with the status, in one commit.

        Raises:
            RollbackError: the session has come further.
            RevokedKeyError: some of its state came from a key that was revoked.
            StorageError: the ledger could not be written.
        """
        with self._admissions:
            if mark is not None:
                self.check_session(mark)
            before = self.find(record.id, record.direction, scope=record.scope)
            if before is None:
                with self._transaction():
                    self._put(record, papers, _Status.INTENT)
            try:
                yield
            except BaseException:
                if before is None:
                    self._forget(record)
                raise
            with self._transaction():
                self._put(record, papers, _Status.ADMITTED)
                if mark is not None:
                    raise_mark(self._all, mark)

    def purge(self, keys: Collection[KeyId]) -> int:
        """Forget artifacts with state that came from these keys, and take none again.

        Waits for an admission that is under way. Marks of sessions stay.

        Returns:
            How many were forgotten.

        Raises:
            StorageError: the ledger could not be written.
        """
        with self._admissions, self._transaction():
            self._barred |= frozenset(keys)
            return len(self._all(_PURGE, (json.dumps(sorted(keys)),)))

    # Sessions.

    def next_sequence(self, scope: str, session: str) -> int:
        """Count one more artifact of a session, durably, before it leaves.

        Raises:
            StorageError: the ledger could not be written.
        """
        with self._transaction():
            return next_sequence(self._all, scope, session)

    def check_session(self, mark: Mark) -> None:
        """Refuse what is older than what was taken of its session.

        Raises:
            RollbackError: it is, or another one has its sequence.
            StorageError: the ledger could not be read.
        """
        check_mark(self._all, mark)

    # What is known.

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

    def papers(self, record: ArtifactRecord) -> Papers:
        """The signed bytes of an artifact.

        Raises:
            StorageError: the ledger could not be read, or the record went.
        """
        found = self._all(_PAPERS, _name(record))
        if not found:
            raise StorageError("the artifact's record went")
        return Papers(*map(bytes, found[0]))

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
            found = self.papers(record).namespace(record.scope)
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
                mark = Mark.of(self.papers(record).manifest(), record.id)
                with self._transaction():
                    self._all(_SETTLE, _name(record))
                    raise_mark(self._all, mark)

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
        papers: Papers,
        status: _Status,
        prefix: bytes = b"",
    ) -> None:
        if not self._barred.isdisjoint({*record.origins, record.issuer}):
            raise RevokedKeyError("state came from a key that was revoked meanwhile")
        values = attrs.asdict(record, recurse=False)
        values["origins"] = " ".join(sorted(record.origins))
        for name in _TIMES:
            values[name] = format_time(values[name])
        columns = (values[name] for name in _COLUMNS)
        self._all(_PUT, (*columns, *attrs.astuple(papers), prefix, status))

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


def _name(record: ArtifactRecord) -> tuple[str, ...]:
    return (record.id, record.direction, record.scope)


def _record(row: tuple[Any, ...]) -> ArtifactRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in _TIMES:
        values[name] = parse_time(values[name])
    values["direction"] = Direction(values["direction"])
    values["origins"] = frozenset(map(KeyId, values["origins"].split()))
    return ArtifactRecord(**values)
