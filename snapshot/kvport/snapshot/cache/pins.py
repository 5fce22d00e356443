"""Pins: nodes that someone wants kept until a fixed time, across restarts.

In: nodes, owners, seconds. Out: rows that eviction, quotas and retention pass by.
Several owners may pin one node; each has its own deadline, which neither a use of the
node nor another owner changes. A pin that ran out holds nothing. All pins together
cover at most half of the cap, so that the cache cannot be pinned shut. Under a smaller
cap a pin yields to those that end later: it stays if it fits into the half beside them.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import attrs

from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.expiry import first_current
from kvport.snapshot.cache.index import ROOT_ROW, Index
from kvport.snapshot.errors import GoneError, PinLimitError

_COVERED: Final = """
WITH RECURSIVE up(n) AS (
    SELECT :n UNION SELECT node FROM pin WHERE until > :now UNION
    SELECT node.parent FROM up JOIN node ON node.n = up.n WHERE node.parent != 0)
SELECT coalesce(sum(alloc), 0) FROM file
WHERE n IN (SELECT file FROM blob WHERE node IN (SELECT n FROM up))"""
_PATH_FILES: Final = """
WITH RECURSIVE up(n) AS (
    SELECT ? UNION
    SELECT node.parent FROM up JOIN node ON node.n = up.n WHERE node.parent != 0)
SELECT n, alloc FROM file
WHERE n IN (SELECT file FROM blob WHERE node IN (SELECT n FROM up))"""
_ENDED_AT_ONCE: Final = 64


@attrs.frozen
class PinInfo:
    """One pin that holds.

    Attributes:
        owner: who pinned.
        namespace: id of the namespace.
        node: name of the path that is held, from the root to this node.
        tokens: its length.
        until: seconds from the epoch.
        seconds_left: until then.
    """

    owner: str
    namespace: str
    node: NodeId
    tokens: int
    until: int
    seconds_left: int


class Pins:
    """All pins of a cache; every method may be called from any thread."""

    def __init__(self, index: Index, account: Account) -> None:
        self._index: Final = index
        self._account: Final = account

    def pin(
        self,
        ns: int,
        node: NodeId,
        owner: str,
        seconds: int,
        *,
        revive: bool = False,
    ) -> int:
        """Hold a path from now on; in place of what the owner had pinned there.

        The caller holds the room of a row.

        Args:
            ns: the namespace's row.
            node: the end of the path.
            owner: of the pin.
            seconds: until it ends.
            revive: whether the path may have expired.

        Returns:
            When it ends: seconds from the epoch.

        Raises:
            ValueError: nobody would hold anything, or for no time.
            GoneError: the node was removed, or has expired.
            PinLimitError: pins would cover more than half of the cap.
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        if node == ROOT_NODE or not owner or seconds < 1:
            raise ValueError("a pin needs a node, an owner, and a second at least")
        with self._index.lock:
            n = self._index.find(ns, node)
            if n is None:
                raise GoneError("the segment to be pinned was removed")
            if not revive and first_current(self._index, [n]) is None:
                raise GoneError("the path to be pinned has expired")
            now = self._index.clock.now()
            ((covered,),) = self._index.all(_COVERED, {"n": n, "now": now})
            if covered > self._account.numbers.cap // 2:
                raise PinLimitError("pins may cover half of the cache's cap at most")
            until = now + seconds
            with self._index.transaction():
                self._index.all(
                    "INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (n, owner, until)
                )
            return until

    def unpin(self, ns: int, node: NodeId, owner: str) -> bool:
        """End an owner's pin of a node; whether there was one that held.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        with self._index.lock:
            n = self._index.find(ns, node)
            held = self._index.all(
                "SELECT until FROM pin WHERE node = ? AND owner = ?", (n, owner)
            )
            if not held:
                return False
            with self._index.transaction():
                self._index.all(
                    "DELETE FROM pin WHERE node = ? AND owner = ?", (n, owner)
                )
            return bool(held[0][0] > self._index.clock.now())

    def drop_ended(self) -> bool:
        """Remove rows of some pins that ran out; whether there were any.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        with self._index.lock:
            ended = self._index.all(
                "SELECT node, owner FROM pin WHERE until <= ? LIMIT ?",
                (self._index.clock.now(), _ENDED_AT_ONCE),
            )
            if not ended:
                return False
            with self._index.transaction():
                for row in ended:
                    self._index.all("DELETE FROM pin WHERE node = ? AND owner = ?", row)
            return True

    def excess(self, cap: int) -> frozenset[int]:
        """Rows of nodes whose pins do not fit into half of a cap; see the module.

        Raises:
            StorageError: the index could not be read.
        """
        with self._index.lock:
            now = self._index.clock.now()
            ((covered,),) = self._index.all(_COVERED, {"n": ROOT_ROW, "now": now})
            if covered <= cap // 2:
                return frozenset()
            kept: dict[int, int] = {}
            excess = set()
            for n, _ in self._index.all(
                "SELECT node, max(until) FROM pin WHERE until > ?"
                " GROUP BY node ORDER BY 2 DESC, 1",
                (now,),
            ):
                with_it = kept | dict(self._index.all(_PATH_FILES, (n,)))
                if sum(with_it.values()) > cap // 2:
                    excess.add(n)
                else:
                    kept = with_it
            return frozenset(excess)

    def count(self, nodes: Collection[int]) -> int:
        """How many pins hold these nodes, whoever owns them.

        Raises:
            StorageError: the index could not be read.
        """
        ((count,),) = self._index.all(
            "SELECT count(*) FROM pin WHERE until > ?"
            " AND node IN (SELECT value FROM json_each(?))",
            (self._index.clock.now(), json.dumps(list(nodes))),
        )
        return int(count)

    def end(self, nodes: Collection[int]) -> Mapping[str, int]:
        """End all pins of some of these nodes, whoever owns them, in one commit.

        Returns:
            How many ended, by namespace id; none are left if none did.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        with self._index.lock:
            ended = self._index.all(
                "SELECT ns.id, pin.node, owner FROM pin"
                " JOIN node ON node.n = pin.node JOIN ns ON ns.n = node.ns"
                " WHERE pin.node IN (SELECT value FROM json_each(?)) LIMIT ?",
                (json.dumps(list(nodes)), _ENDED_AT_ONCE),
            )
            if ended:
                with self._index.transaction():
                    for _, *row in ended:
                        self._index.all(
                            "DELETE FROM pin WHERE node = ? AND owner = ?", row
                        )
            return Counter(namespace for namespace, *_ in ended)

    def holds(self, ns: int, node: NodeId) -> bool:
        """Whether a pin names this very node."""
        with self._index.lock:
            return bool(len(self)) and bool(
                self._index.all(
                    "SELECT 1 FROM pin WHERE node = ? AND until > ? LIMIT 1",
                    (self._index.find(ns, node), self._index.clock.now()),
                )
            )

    def rows(self, ns: int) -> list[int]:
        """Row numbers of the nodes of a namespace that pins name."""
        found = self._index.all(
            "SELECT DISTINCT node FROM pin JOIN node ON node.n = pin.node"
            " WHERE ns = ? AND until > ?",
            (ns, self._index.clock.now()),
        )
        return [n for (n,) in found]

    def __len__(self) -> int:
        """Nodes that pins name."""
        ((count,),) = self._index.all(
            "SELECT count(DISTINCT node) FROM pin WHERE until > ?",
            (self._index.clock.now(),),
        )
        return int(count)

    def listed(self) -> list[PinInfo]:
        """All that hold, the first to end first."""
        now = self._index.clock.now()
        rows = self._index.all(
            'SELECT owner, ns.id, node.id, "end", until FROM pin'
            " JOIN node ON node.n = pin.node JOIN ns ON ns.n = node.ns"
            " WHERE until > ? ORDER BY until, owner, node.n",
            (now,),
        )
        return [
            PinInfo(owner, ns, NodeId(node), end, until, until - now)
            for owner, ns, node, end, until in rows
        ]
