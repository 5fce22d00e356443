"""Removal: of the oldest leaves to make room, of what is damaged, or not kept.

In: bytes that are needed, nodes that must go, blobs that nodes lose. Out: room on the
account, files unlinked, and `on_removed` told. Files go in an order that a crash cannot
harm: rows away and files doomed in one commit, unlinked, doomed rows away.

On a full volume the index cannot grow for the commit. Then the ballast goes first, then
the removal is cut, and in the end files go before their rows: after a crash these nodes
count as missing, and the next start finishes what was begun.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.account import Account, Reservation, allocation_bound
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.files import Files, is_directory, remove_tree, storage_io
from kvport.snapshot.cache.index import ROOT_ROW, FileRow, GoneNode, Index
from kvport.snapshot.cache.leases import Leases
from kvport.snapshot.cache.oldest import oldest
from kvport.snapshot.cache.pruning import Pruning
from kvport.snapshot.cache.records import RemovalReason, Removed
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import CapacityError, DiskFullError, StorageError

_log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


class Evictor:
    """The only way by which nodes and files go.

    `changes` is held by whoever writes, admits or removes: one change at a time.
    Lookups and reads do not take it.
    """

    def __init__(
        self,
        index: Index,
        files: Files,
        account: Account,
        ballast: Ballast,
        *,
        counters: Counters,
        on_removed: Callable[[Sequence[Removed]], None],
    ) -> None:
        self.changes: Final = threading.RLock()
        self.leases: Final = Leases(index)
        self._index = index
        self._files = files
        self._account = account
        self._ballast = ballast
        self._counters = counters
        self._on_removed = on_removed

    def reserve(self, nbytes: int) -> Reservation:
        """Hold `nbytes`, evicting for them where needed.

        Raises:
            CapacityError: leased state leaves no room; or nothing could, and then
                nothing is evicted.
            StorageError: the index could not be written.
        """
        if not self._account.fits_ever(nbytes):
            raise CapacityError("larger than the cache's cap")
        while not self._account.take(nbytes):
            with self.changes:
                missing = self._account.shortfall(nbytes)
                if missing > 0 and not self._evict_some(missing):
                    raise CapacityError("what is in use leaves no room")
        return Reservation(self._account, nbytes)

    def shrink(self) -> None:
        """Evict until blobs and rows are within the cap again, as far as possible."""
        with self.changes:
            while (missing := self._account.shortfall()) > 0:
                if not self._evict_some(missing):
                    return

    def remove(self, ns: int, roots: Sequence[int], reason: RemovalReason) -> None:
        """Remove these nodes and all below them, in spite of leases.

        Raises:
            StorageError: the index could not be written.
        """
        with self.changes:
            # From the end: what is left after a crash is a tree still.
            nodes = self._index.subtree(ns, roots)[::-1]
            while nodes:
                gone = self._commit(nodes[: self._index.rows_per_removal])
                self._finish(gone, reason)
                nodes = nodes[len(gone) :]

    def prune(self, plan: Callable[[], Pruning]) -> None:
        """Drop what a plan names, in one commit as a rule, until it names no more.

        Args:
            plan: made with the index's lock held, so that no lease comes in between.

        Raises:
            DiskFullError: the index cannot grow for it, even with the ballast's room.
            StorageError: the index could not be written.
        """
        with self.changes:
            while True:
                with self._index.lock:
                    if not (pruning := plan()):
                        return
                    gone, lost = self.relieved(
                        functools.partial(self._commit_pruning, pruning)
                    )
                for blob_class, nbytes in lost:
                    self._counters.add_pruned(blob_class, nbytes)
                self._finish(gone, RemovalReason.SUPERSEDED)

    def ensure_directory(self, namespace_id: str, ns: int) -> None:
        """Make a namespace's directory again, and forget what was in it.

        Raises:
            StorageError: the volume refused.
        """
        if is_directory(self._files.namespace(namespace_id)):
            return
        _log.warning("cache_directory_removed")
        with self.changes:
            roots = self._index.all(
                "SELECT n FROM node WHERE ns = ? AND parent = ?", (ns, ROOT_ROW)
            )
            self.remove(ns, [n for (n,) in roots], RemovalReason.MISSING)
            self._files.make_directory(self._files.namespace(namespace_id))

    def unlink_doomed(self) -> None:
        """Unlink files that lost their last node; one that cannot go stays on account.

        Raises:
            StorageError: the index could not be written.
        """
        gone = [file for file in self._index.doomed() if self._unlink(file)]
        if not gone:
            return
        try:
            self.relieved(lambda: self._index.forget_files(gone))
        except DiskFullError:
            # Rows without files do no harm; they go, and leave the account, next time.
            _log.warning("cache_rows_kept", files=len(gone))
        else:
            self._account.change(blobs=-sum(file.alloc for file in gone))

    # A volume without room.

    def with_room(self, nbytes: int, change: Callable[[], _Result]) -> _Result:
        """What `change` returns; if the volume is full of our own, it is tried twice.

        In between the oldest leaves go, until their files gave back `nbytes` and as
        much as the ballast needs. `changes` must be held.

        Raises:
            DiskFullError: the volume is full of other things, or of what is in use.
        """
        try:
            return change()
        except DiskFullError:
            if not self.free(nbytes + 2 * self._account.ballast):
                raise
        return change()

    def relieved(self, change: Callable[[], _Result]) -> _Result:
        """What `change` returns, if need be with the ballast's room.

        Raises:
            DiskFullError: that is not enough, or was given up before.
        """
        try:
            return change()
        except DiskFullError:
            if not self._drop_ballast():
                raise
        return change()

    def free(self, nbytes: int) -> bool:
        """Evict until files have given back `nbytes`; whether anything went.

        Goes by the account, not by what the volume then says it has: with snapshots,
        or a busy neighbour, that would cost the whole cache.

        Raises:
            StorageError: the index could not be written.
        """
        with self.changes:
            target = self._account.numbers.blobs - nbytes
            went = 0
            while (missing := self._account.numbers.blobs - target) > 0:
                if not (gone := self._evict_some(missing)):
                    break
                went += gone
            return bool(went)

    def ensure_reserve(self) -> None:
        """Evict for free bytes on the volume, as many as the ballast has, and make it.

        Raises:
            StorageError: the index could not be written.
        """
        size = self._account.ballast
        # Twice, since the first removal may take the ballast.
        for _ in range(2):
            wanted = size if self._ballast.stands(size) else 3 * size
            missing = wanted - self._ballast.free_bytes()
            if missing > 0:
                self.free(missing)
        self.renew_ballast()

    def renew_ballast(self) -> None:
        """Make the ballast where it is missing, if the volume has room for two."""
        size = self._account.ballast
        if self._ballast.stands(size) or self._ballast.free_bytes() < 2 * size:
            return
        try:
            self._drop_ballast()
            with self.reserve(allocation_bound(size)), storage_io():
                self._ballast.make(size)
                self._account.measured(overhead=self._files.overhead_bytes())
        except (CapacityError, DiskFullError, StorageError) as error:
            _log.warning("cache_ballast_missing", reason=error.code)

    def _drop_ballast(self) -> bool:
        if not self._ballast.drop():
            return False
        with storage_io():
            self._account.measured(overhead=self._files.overhead_bytes())
        return True

    def _commit(self, nodes: Sequence[int]) -> list[GoneNode]:
        """Remove rows, children first; on a full volume perhaps only the first."""
        while True:
            try:
                with self._index.transaction():
                    return self._index.remove(nodes)
            except DiskFullError:
                if self._drop_ballast():
                    continue
                if len(nodes) > 1:
                    nodes = nodes[: len(nodes) // 2]
                elif not self._unlink_own(nodes[0]):
                    raise

    def _unlink_own(self, n: int) -> bool:
        """Unlink the files that go with a node; whether one was there."""
        there = [
            file
            for file in self._index.own_files(n)
            if os.path.lexists(self._files.blob(file.namespace, file.digest))
        ]
        return sum(map(self._unlink, there)) > 0

    def _unlink(self, file: FileRow) -> bool:
        if not is_directory(self._files.namespace(file.namespace)):
            return True  # It went with its directory; a link in its place is not ours.
        try:
            remove_tree(self._files.blob(file.namespace, file.digest))
        except OSError as error:
            _log.warning("cache_unlink_failed", errno=error.errno)
            return False
        return True

    # Removal.

    def _commit_pruning(
        self, pruning: Pruning
    ) -> tuple[list[GoneNode], list[tuple[BlobClass, int]]]:
        limit = self._index.rows_per_removal
        nodes = pruning.nodes[:limit]
        with self._index.transaction():
            gone = self._index.remove(nodes)
            lost = [
                blob
                for drop in pruning.drops[: limit - len(nodes)]
                for blob in self._index.drop(drop.n, drop.classes, drop.kinds)
            ]
        return gone, lost

    def _finish(self, gone: Sequence[GoneNode], reason: RemovalReason) -> None:
        try:
            self.unlink_doomed()
        finally:
            self._tell(gone, reason)

    def _tell(self, gone: Sequence[GoneNode], reason: RemovalReason) -> None:
        if not gone:
            return
        self._counters.add_removed(reason, len(gone))
        told = [Removed(node.namespace, node.key, node.end, reason) for node in gone]
        try:
            self._on_removed(told)
        except Exception as error:  # noqa: BLE001 - gone is gone, told or not
            _log.error("cache_removal_not_told", error=type(error).__name__)

    def _evict_some(self, missing: int) -> int:
        # Under the lock, so that no lease comes between choice and removal.
        with self._index.lock:
            # Without room for it, the order is the one of the last commit.
            with contextlib.suppress(DiskFullError):
                self.relieved(self._index.store_touched)
            nodes = oldest(self._index, self.leases, missing)
            if not nodes:
                return 0
            gone = self._commit(nodes)
        self._finish(gone, RemovalReason.EVICTED)
        return len(gone)
