"""The database below the index: one connection, one lock, accounted transactions.

In: SQL. Out: rows. `transaction()` keeps the account ahead of the log and the database.
Recency is a counter, not a clock. A hit only notes it, with the time and the expiry
that it renews; the next transaction stores them.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from kvport.snapshot.cache.account import BLOCK, Account
from kvport.snapshot.cache.clock import WallClock
from kvport.snapshot.cache.companions import suspect
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.schema import (
    in_our_words,
    is_corruption,
    storage_errors,
)
from kvport.snapshot.errors import CacheAbsentError, DiskFullError, StorageError

_FRAME: Final = BLOCK + 24
_KEPT: Final[list[sqlite3.Connection]] = []
"""Connections that must not be closed; see `Database._is_mistaken`."""

_RENEW: Final = """
UPDATE node SET used = :used, at = max(at, :at), expires =
    CASE WHEN expires = 0 OR :expires = 0 THEN 0 ELSE max(expires, :expires) END
WHERE n = :n"""


@attrs.frozen
class _Use:
    """A hit that is only noted: recency, time, and the expiry that it gives."""

    used: int
    at: int
    expires: int


class Database:
    """Every method may be called from any thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        account: Account,
        wall: Callable[[], float],
    ) -> None:
        self.lock: Final = threading.RLock()
        self.ttls: Final[dict[str, int]] = {}
        """By namespace: seconds after the last use until its nodes expire."""
        self.rows_per_removal: Final = max(1, account.headroom // 4 // (12 * _FRAME))
        self._connection = connection
        self._closed = False
        self._files = (path, path.with_name(path.name + "-wal"))
        self._sizes = dict.fromkeys(self._files, 0)
        self._account = account
        self._touched: dict[int, _Use] = {}
        self._used = int(self.all("SELECT coalesce(max(used), 0) FROM node")[0][0])
        ((seen,),) = self.all("SELECT clock FROM root")
        self.clock: Final = WallClock(wall, int(seen))
        with storage_io():
            # SQLite has made its log by now, and keeps it until it closes.
            self._place, self._log_place = (file.stat() for file in self._files)
        self._measure()

    def close(self) -> None:
        """Store what was only noted, and the time; SQLite empties its log.

        So what has expired stays so if the clock is set back before the next start.
        """
        with self.lock, storage_errors():
            try:
                if self._touched or self.clock.advanced:
                    with self.transaction(closing=True):
                        pass
            finally:
                self._closed = True
                if self._is_mistaken():
                    _KEPT.append(self._connection)
                else:
                    self._connection.close()

    def verify(self) -> None:
        """See that the files at the index's path are those that are open.

        What is written to others would be lost with this process.

        Raises:
            StorageError: they are not.
        """
        opened = self._place, self._log_place
        with storage_io(), contextlib.suppress(FileNotFoundError):
            there = [file.stat() for file in self._files]
            if all(map(os.path.samestat, opened, there)):
                return
        raise StorageError("the index was removed, or another took its place")

    def all(self, sql: str, parameters: Any = ()) -> list[Any]:  # noqa: ANN401 - SQL
        """Rows of one statement.

        Raises:
            StorageError: the index could not be read.
        """
        with self.lock:
            if self._closed:
                raise CacheAbsentError("the cache was closed")
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                self._note(error)
                raise in_our_words(error) from error

    @contextlib.contextmanager
    def transaction(self, *, closing: bool = False) -> Iterator[None]:
        """One commit: durable on return, or undone on any error.

        Growth for new nodes must be held by the caller (`NODE_BYTES` each); removals
        of `rows_per_removal` nodes fit into the headroom.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        with self.lock, storage_errors():
            self._account.change(index=self._account.headroom // 4)
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._write_touched()
                    seen = self.clock.now() if closing else self.clock.unsaved
                    if seen is not None:
                        self.all("UPDATE root SET clock = ?", (seen,))
                    yield
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                self._touched.clear()
                if seen is not None:
                    self.clock.saved(seen)
            finally:
                self._measure()
            if self._log_bytes() > self._account.headroom // 4:
                # The commit stands whatever comes of this; the next one tries again.
                with contextlib.suppress(DiskFullError, StorageError):
                    self.checkpoint()

    def checkpoint(self) -> None:
        """Move the log into the database, empty it, and return some free pages."""
        with self.lock, storage_errors():
            pages = self._pragma("page_count")
            free = self._pragma("freelist_count")
            with storage_io():
                growth = max(0, pages * BLOCK - self._files[0].stat().st_size)
            self._account.change(index=growth + self._account.headroom // 4)
            try:
                if free > pages // 4:
                    some = max(1, self._account.headroom // 8 // (4 * _FRAME))
                    self.all(f"PRAGMA incremental_vacuum({some})")
                self.all("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                self._measure()

    def next_used(self) -> int:
        """A recency that is later than all before."""
        with self.lock:
            self._used += 1
            return self._used

    def touch(self, n: int, at: int | None = None) -> None:
        """Note that a node was used, and so renewed; the next transaction stores it.

        Args:
            n: the node.
            at: when, in seconds from the epoch; now if None.
        """
        with self.lock:
            noted = self._touched[n].at if n in self._touched else 0
            self._touched[n] = self._use_of(n, max(noted, self._time(at)))
            if len(self._touched) % self.rows_per_removal == 0:
                # A lookup does not fail for it; what is noted stays noted.
                with contextlib.suppress(DiskFullError, StorageError):
                    self.store_touched()

    def store_touched(self) -> None:
        """Store recencies that were only noted."""
        with self.lock:
            if self._touched:
                with self.transaction():
                    pass

    def recency(self, n: int, stored: int) -> int:
        """The node's recency, with what is only noted yet."""
        return self._touched[n].used if n in self._touched else stored

    def use(self, n: int, at: int | None = None) -> None:
        """As `touch`, stored at once. To be called in a transaction."""
        use = self._use_of(n, self._time(at))
        self._connection.execute(_RENEW, {"n": n, **attrs.asdict(use)})

    def ttl_of(self, ns: int, ttl: int | None) -> int | None:
        """Seconds after the last use until a node of this ttl expires; None for never.

        Args:
            ns: whose setting counts if the node has none of its own.
            ttl: the node's own, in seconds.
        """
        if ttl is not None or not self.ttls:
            return ttl
        ((namespace_id,),) = self.all("SELECT id FROM ns WHERE n = ?", (ns,))
        return self.ttls.get(namespace_id)

    def expiry(self, ns: int, ttl: int | None, at: int | None = None) -> int:
        """When a node expires that is used `at` a time, or now.

        In seconds from the epoch; 0 for never.
        """
        seconds = self.ttl_of(ns, ttl)
        return 0 if seconds is None else self._time(at) + seconds

    def renewed(self, now: int) -> list[int]:
        """Nodes whose expiry is only noted yet, and after `now`."""
        uses = self._touched.items()
        return [n for n, use in uses if use.expires == 0 or use.expires > now]

    def insert(self, sql: str, parameters: tuple[Any, ...]) -> int:
        """Run an INSERT; returns the row number. To be called in a transaction."""
        row = self._connection.execute(sql, parameters).lastrowid
        if row is None:
            raise StorageError("an insert gave no row")
        return row

    def forget_touch(self, n: int) -> None:
        """Drop what was noted about a node that is being removed."""
        self._touched.pop(n, None)

    def _note(self, error: sqlite3.Error) -> None:
        """Have the next start read all of an index that was found corrupt."""
        if is_corruption(error):
            with contextlib.suppress(OSError):
                suspect(self._files[0])

    def _is_mistaken(self) -> bool:
        """Whether SQLite would remove another database's log with its own.

        It closes a database that was moved away without touching what took its place,
        but knows it by the number of the file alone, which another volume may have.
        """
        try:
            found = self._files[0].stat()
        except OSError:
            return False
        return found.st_ino == self._place.st_ino and found.st_dev != self._place.st_dev

    def _use_of(self, n: int, at: int) -> _Use:
        expires = 0
        for ns, ttl in self.all("SELECT ns, ttl FROM node WHERE n = ?", (n,)):
            expires = self.expiry(ns, ttl, at)
        return _Use(self.next_used(), at, expires)

    def _time(self, at: int | None) -> int:
        return self.clock.now() if at is None else at

    def _write_touched(self) -> None:
        self._connection.executemany(
            _RENEW,
            [{"n": n, **attrs.asdict(use)} for n, use in self._touched.items()],
        )

    def _pragma(self, name: str) -> int:
        ((value,),) = self.all(f"PRAGMA {name}")
        return int(value)

    def _log_bytes(self) -> int:
        try:
            return self._files[1].stat().st_size
        except OSError:
            # What was committed stands, whatever becomes of its log.
            return 0

    def _measure(self) -> None:
        for file in self._files:
            # What was unlinked takes its room as long as it is open.
            with contextlib.suppress(OSError):
                self._sizes[file] = file.stat().st_blocks * 512
        self._account.measured(index=sum(self._sizes.values()))
