"""Leases: owned holds that keep nodes, and hence their ancestors, from eviction.

In: a node's id. Out: the set of ids that eviction must pass by. A *reading* lease keeps
all blobs of its path as well: an export reads them, where a chain only hangs on it.
Leases live as long as the process; damage is removed in spite of them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.index import Index
from kvport.snapshot.errors import GoneError


class Leases:
    """All leases of a cache; guarded by the index's lock, like what they hold."""

    def __init__(self, index: Index) -> None:
        self._index: Final = index
        self._held: Counter[tuple[int, NodeId]] = Counter()
        self._read: Counter[tuple[int, NodeId]] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, ns: int, node: NodeId) -> bool:
        """Whether a lease names this very node."""
        return (ns, node) in self._held

    def rows(self, ns: int, *, reading: bool = False) -> list[int]:
        """Row numbers of the nodes that leases of a namespace name, or reading ones."""
        held = self._read if reading else self._held
        found = (self._index.find(ns, node) for where, node in held if where == ns)
        return [n for n in found if n is not None]

    def acquire(
        self, ns: int, node: NodeId, owner: str, *, reading: bool = True
    ) -> "Lease":
        """Hold a node.

        Raises:
            GoneError: it was removed.
        """
        counters = (self._held, self._read) if reading else (self._held,)
        lease = Lease(functools.partial(self._swap, counters, ns), owner)
        lease.move(node)
        return lease

    def _swap(
        self,
        counters: Sequence[Counter[tuple[int, NodeId]]],
        ns: int,
        new: NodeId,
        old: NodeId,
    ) -> None:
        with self._index.lock:
            if new != ROOT_NODE and self._index.find(ns, new) is None:
                raise GoneError("the segment to be leased was removed")
            for held in counters:
                if new != ROOT_NODE:
                    held[ns, new] += 1
                if old != ROOT_NODE:
                    held[ns, old] -= 1
                    if not held[ns, old]:
                        del held[ns, old]


class Lease:
    """One hold; a context manager that ends it.

    Attributes:
        owner: who holds, for people who ask why something stays.
        tip: the node held, `ROOT_NODE` once released.
    """

    def __init__(self, swap: Callable[[NodeId, NodeId], None], owner: str) -> None:
        self._swap = swap
        self.owner: Final = owner
        self.tip = ROOT_NODE

    def move(self, tip: NodeId) -> None:
        """Hold another node instead, without a moment in between.

        Raises:
            GoneError: the other node was removed; the hold is as it was.
        """
        self._swap(tip, self.tip)
        self.tip = tip

    def release(self) -> None:
        """End the hold; a second time does nothing."""
        self.move(ROOT_NODE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
