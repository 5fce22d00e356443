"""Removal: of the least recently used leaves to make room, and of what is damaged.

In: bytes that are needed, or nodes that must go. Out: room on the account, files
unlinked, and `on_removed` told. Files go in an order that a crash cannot harm: rows
away and files doomed in one commit, unlinked, doomed rows away.
"""

import heapq
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import structlog

from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.account import Account, Reservation
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import ROOT_ROW, GoneNode, Index
from kvport.snapshot.cache.leases import Leases
from kvport.snapshot.cache.records import RemovalReason, Removed
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import CapacityError

_log = structlog.get_logger(__name__)


@attrs.frozen(order=True)
class _Leaf:
    used: int
    n: int
    ns: int
    id: NodeId
    parent: int


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
        counters: Counters,
        on_removed: Callable[[Sequence[Removed]], None],
    ) -> None:
        self.changes: Final = threading.RLock()
        self.leases: Final = Leases(index)
        self._index = index
        self._files = files
        self._account = account
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
            nodes = self._index.subtree(ns, roots)
            step = self._index.rows_per_removal
            # From the end: what is left after a crash is a tree still.
            for stop in range(len(nodes), 0, -step):
                self._remove(nodes[max(0, stop - step) : stop], reason)

    def ensure_directory(self, namespace_id: str, ns: int) -> None:
        """Make a namespace's directory again, and forget what was in it.

        Raises:
            StorageError: the volume refused.
        """
        if self._files.namespace(namespace_id).is_dir():
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
        gone = []
        for file in self._index.doomed():
            try:
                self._files.blob(file.namespace, file.digest).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("cache_unlink_failed", errno=error.errno)
            else:
                gone.append(file)
                self._account.change(blobs=-file.alloc)
        if gone:
            self._index.forget_files(gone)

    def _remove(self, nodes: Sequence[int], reason: RemovalReason) -> None:
        with self._index.transaction():
            gone = self._index.remove(nodes)
        self._finish(gone, reason)

    def _finish(self, gone: Sequence[GoneNode], reason: RemovalReason) -> None:
        self.unlink_doomed()
        self._counters.add_removed(reason, len(gone))
        told = [Removed(node.namespace, node.key, node.end, reason) for node in gone]
        try:
            self._on_removed(told)
        except Exception as error:  # noqa: BLE001 - gone is gone, told or not
            _log.error("cache_removal_not_told", error=type(error).__name__)

    def _evict_some(self, missing: int) -> int:
        # Under the lock, so that no lease comes between choice and removal.
        with self._index.lock:
            self._index.store_touched()
            nodes = self._oldest(missing)
            if not nodes:
                return 0
            with self._index.transaction():
                gone = self._index.remove(nodes)
        self._finish(gone, RemovalReason.EVICTED)
        return len(gone)

    def _oldest(self, missing: int) -> list[int]:
        """Unleased leaves, oldest first, and parents that become leaves on the way."""
        limit = self._index.rows_per_removal
        fetched = limit + len(self.leases)
        leaves = self._leaves(fetched)
        horizon = leaves[-1].used if len(leaves) == fetched else sys.maxsize
        heap = [leaf for leaf in leaves if not self.leases.holds(leaf.ns, leaf.id)]
        heapq.heapify(heap)
        chosen: list[int] = []
        lost: dict[int, int] = {}
        # A parent's recency may lie beyond leaves that were not fetched: stop there.
        while heap and missing > 0 and len(chosen) < limit and heap[0].used <= horizon:
            leaf = heapq.heappop(heap)
            chosen.append(leaf.n)
            missing -= self._freed_by(leaf.n)
            if leaf.parent == ROOT_ROW:
                continue
            lost[leaf.parent] = lost.get(leaf.parent, 0) + 1
            parent, children = self._node(leaf.parent, leaf.used)
            if lost[leaf.parent] == children and not self.leases.holds(
                parent.ns, parent.id
            ):
                heapq.heappush(heap, parent)
        return chosen

    def _leaves(self, count: int) -> list[_Leaf]:
        rows = self._index.all(
            "SELECT used, n, ns, id, parent FROM node WHERE children = 0"
            " ORDER BY used LIMIT ?",
            (count,),
        )
        return [_Leaf(used, n, ns, NodeId(i), p) for used, n, ns, i, p in rows]

    def _node(self, n: int, used: int) -> tuple[_Leaf, int]:
        ((own, ns, node, parent, children),) = self._index.all(
            "SELECT used, ns, id, parent, children FROM node WHERE n = ?", (n,)
        )
        return _Leaf(max(own, used), n, ns, NodeId(node), parent), children

    def _freed_by(self, n: int) -> int:
        ((freed,),) = self._index.all(
            "SELECT coalesce(sum(file.alloc), 0) FROM blob"
            " JOIN file ON file.n = blob.file WHERE blob.node = ? AND"
            " (SELECT count(*) FROM blob other WHERE other.file = file.n) = 1",
            (n,),
        )
        return int(freed)
