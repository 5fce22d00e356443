"""The database below the index: one connection, one lock, accounted transactions.

In: SQL. Out: rows. `transaction()` keeps the account ahead of the log and the database.
Recency is a counter, not a clock; a hit only notes it, the next transaction stores it.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvport.snapshot.cache.account import BLOCK, Account
from kvport.snapshot.cache.schema import storage_errors
from kvport.snapshot.errors import DiskFullError, StorageError

_FRAME: Final = BLOCK + 24


class Database:
    """Every method may be called from any thread."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, account: Account
    ) -> None:
        self.lock: Final = threading.RLock()
        self.rows_per_removal: Final = max(1, account.headroom // 4 // (12 * _FRAME))
        self._connection = connection
        self._files = (path, path.with_name(path.name + "-wal"))
        self._account = account
        self._touched: dict[int, int] = {}
        self._used = int(self.all("SELECT coalesce(max(used), 0) FROM node")[0][0])
        self._measure()

    def close(self) -> None:
        """Store what was only noted, and close; SQLite empties its log."""
        with self.lock, storage_errors():
            try:
                self.store_touched()
            finally:
                self._connection.close()

    def all(self, sql: str, parameters: Any = ()) -> list[Any]:  # noqa: ANN401 - SQL
        """Rows of one statement.

        Raises:
            StorageError: the index could not be read.
        """
        with self.lock, storage_errors():
            return self._connection.execute(sql, parameters).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
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
                    yield
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                self._touched.clear()
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

    def touch(self, n: int) -> None:
        """Note that a node was used; the next transaction stores it."""
        with self.lock:
            self._touched[n] = self.next_used()
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
        return self._touched.get(n, stored)

    def insert(self, sql: str, parameters: tuple[Any, ...]) -> int:
        """Run an INSERT; returns the row number. To be called in a transaction."""
        row = self._connection.execute(sql, parameters).lastrowid
        if row is None:
            raise StorageError("an insert gave no row")
        return row

    def forget_touch(self, n: int) -> None:
        """Drop what was noted about a node that is being removed."""
        self._touched.pop(n, None)

    def _write_touched(self) -> None:
        self._connection.executemany(
            "UPDATE node SET used = ? WHERE n = ?",
            [(used, n) for n, used in self._touched.items()],
        )

    def _pragma(self, name: str) -> int:
        ((value,),) = self.all(f"PRAGMA {name}")
        return int(value)

    def _log_bytes(self) -> int:
        try:
            return self._files[1].stat().st_size
        except FileNotFoundError:
            return 0

    def _measure(self) -> None:
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError):
                total += file.stat().st_blocks * 512
        self._account.measured(index=total)
