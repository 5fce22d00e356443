"""Removal: the one way by which nodes and files go, whatever the reason.

In: nodes that must go, blobs that nodes lose. Out: rows and files gone, and
`on_removed` told. Files go in an order that a crash cannot harm: rows away and files
doomed in one commit, unlinked, doomed rows away.

On a full volume the index cannot grow for the commit. Then the ballast goes first, then
the removal is cut, and in the end files go before their rows: after a crash these nodes
count as missing, and the next start finishes what was begun.
"""

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import structlog

from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.clock import Clocks
from kvport.snapshot.cache.directories import is_directory
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import ROOT_ROW, FileRow, GoneNode, Index, LostBlob
from kvport.snapshot.cache.leases import Leases
from kvport.snapshot.cache.pins import Pins
from kvport.snapshot.cache.pruning import Pruning
from kvport.snapshot.cache.records import RemovalReason, Removed
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import DiskFullError, StorageError

_log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


class Remover:
    """Removes what it is told.

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
        clocks: Clocks,
        counters: Counters,
        on_removed: Callable[[Sequence[Removed]], None],
    ) -> None:
        self.changes: Final = threading.RLock()
        self.pins: Final = Pins(index, account)
        self.leases: Final = Leases(index, self.pins, clocks.boot)
        self._index: Final = index
        self._files: Final = files
        self._account: Final = account
        self._ballast: Final = ballast
        self._counters: Final = counters
        self._on_removed: Final = on_removed
        self._measuring: Final = threading.Lock()

    def remove(self, ns: int, roots: Sequence[int], reason: RemovalReason) -> int:
        """Remove these nodes and all below them, in spite of leases.

        Returns:
            How many nodes went.

        Raises:
            StorageError: the index could not be written.
        """
        with self.changes:
            # From the end: what is left after a crash is a tree still.
            nodes = self._index.subtree(ns, roots)[::-1]
            count = len(nodes)
            while nodes:
                gone = self._commit(nodes[: self._index.rows_per_removal])
                self._finish(gone, reason)
                nodes = nodes[len(gone) :]
            return count

    def remove_some(
        self, choose: Callable[[], Sequence[int]], reason: RemovalReason
    ) -> int:
        """Remove what is chosen, in one commit; answers how many nodes went.

        On a full volume that may be the first ones only.

        Args:
            choose: called with the index's lock held, so that no lease comes in
                between; rows, children before their parents, `rows_per_removal` at
                most.
            reason: why they go.

        Raises:
            DiskFullError: the index cannot grow for it.
            StorageError: the index could not be written.
        """
        with self.changes:
            with self._index.lock:
                if not (nodes := choose()):
                    return 0
                gone = self._commit(nodes)
            self._finish(gone, reason)
            return len(gone)

    def prune(
        self,
        plan: Callable[[], Pruning],
        reason: RemovalReason = RemovalReason.SUPERSEDED,
    ) -> None:
        """Drop what a plan names, in one commit as a rule, until it names no more.

        Args:
            plan: made with the index's lock held, so that no lease comes in between.
            reason: why the nodes go that it names; blobs of others count as pruned
                if they are superseded, and as cleared else.

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
                counters = self._counters
                for one in lost:
                    if reason is RemovalReason.SUPERSEDED:
                        # To be held against what was written, which is lengths.
                        counters.add_pruned(one.namespace, one.blob_class, one.size)
                    else:
                        counters.add_cleared(one.namespace, one.blob_class, one.alloc)
                self._finish(gone, reason)

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
        self._files.check_root()
        gone = [file for file in self._index.doomed() if self._unlink(file)]
        if not gone:
            return

        def forget() -> None:
            # Rows and account together, for whoever reads both.
            with self._index.lock:
                self._index.forget_files(gone)
                self._account.change(blobs=-sum(file.alloc for file in gone))

        try:
            self.relieved(forget)
        except DiskFullError:
            # Rows without files do no harm; they go, and leave the account, next time.
            _log.warning("cache_rows_kept", files=len(gone))
        finally:
            # Some file systems let directories shrink.
            self.measure()

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

    # Internals.

    def measure(self, foreign: Iterable[Path] | None = None) -> None:
        """Bring directories, and what could not be removed, on the account.

        Args:
            foreign: this too, and directories in which nothing was changed by us.
        """
        # The last to look is the last to tell.
        with self._measuring, contextlib.suppress(OSError, StorageError):
            overhead = self._files.overhead_bytes(foreign)
            self._account.measured(overhead=overhead)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Make directories and files, and `measure` whatever came of it."""
        try:
            yield
        finally:
            self.measure()

    def _drop_ballast(self) -> bool:
        self._files.check_root()
        if not self._ballast.drop():
            return False
        self.measure()
        return True

    def _commit(self, nodes: Sequence[int]) -> list[GoneNode]:
        """Remove rows, children first; on a full volume perhaps only the first."""
        self._files.check_root()
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
        self._files.check_root()
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
            self._files.unlink(self._files.blob(file.namespace, file.digest))
        except OSError as error:
            _log.warning("cache_unlink_failed", errno=error.errno)
            return False
        return True

    def _commit_pruning(
        self, pruning: Pruning
    ) -> tuple[list[GoneNode], list[LostBlob]]:
        self._files.check_root()
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
        for namespace, count in Counter(node.namespace for node in gone).items():
            self._counters.add_removed(namespace, reason, count)
        told = [Removed(node.namespace, node.key, node.end, reason) for node in gone]
        try:
            self._on_removed(told)
        except Exception as error:  # noqa: BLE001 - gone is gone, told or not
            _log.error("cache_removal_not_told", error=type(error).__name__)
