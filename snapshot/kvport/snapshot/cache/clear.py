"""Clearing: removal because someone said so, of all or of a part.

In: namespaces, classes of blobs, an age, or ends of paths. Out: what went, in bytes of
the account, and what was passed by because it is leased or pinned. Nodes are looked at
from the last row to the first, since children have higher numbers than their parents;
what is stored in the meantime keeps its path, whose nodes have children then.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final

import attrs

from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.pruning import Drop, Pruning, at_or_above
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.schema import class_of

_NODES: Final = """
SELECT n, parent, children, at,
    (SELECT group_concat(class) FROM blob WHERE blob.node = node.n)
FROM node WHERE ns = :ns AND n <= :last ORDER BY n DESC LIMIT :most"""
_NODE: Final = "SELECT n, parent, children, at, NULL FROM node WHERE n = ?"
_LAST: Final = (1 << 63) - 1


class KeptReason(StrEnum):
    """Why a node was passed by."""

    LEASED = "leased"
    PINNED = "pinned"
    SHARED = "shared"
    """Another path goes on from it."""


@attrs.frozen
class Cleared:
    """What clearing did.

    Attributes:
        freed_bytes: allocated bytes of files that went.
        removed_segments: nodes that went.
        dropped_blobs: blobs that went from nodes that stay.
        kept: nodes that would have gone, by the reason why they did not.
    """

    freed_bytes: int
    removed_segments: int
    dropped_blobs: int
    kept: Mapping[KeptReason, int]


@attrs.frozen
class _Node:
    n: int
    parent: int
    children: int
    at: int
    classes: str | None


class Clearing:
    """One order to clear, in batches; each raises what `Evictor.remove_some` does."""

    def __init__(
        self,
        index: Index,
        account: Account,
        evictor: Evictor,
        *,
        latest: int | None,
        force: bool,
        reason: RemovalReason,
    ) -> None:
        """Clear what was used last at `latest` or before; None for all.

        With `force`, what is leased or pinned goes as well; it is counted by `reason`.
        """
        self._reason: Final = reason
        self._index: Final = index
        self._account: Final = account
        self._evictor: Final = evictor
        self._latest: Final = latest
        self._force: Final = force
        self._freed = self._removed = self._dropped = 0
        self._kept: dict[int, KeptReason] = {}

    @property
    def result(self) -> Cleared:
        """What was done so far."""
        kept = Counter(self._kept.values())
        return Cleared(self._freed, self._removed, self._dropped, kept)

    def whole(self, ns: int) -> None:
        """Remove nodes of a namespace, each with all below it."""
        last = _LAST
        while last:
            last = self._remove(functools.partial(self._childless, ns, last))

    def parts(self, ns: int, classes: Collection[BlobClass]) -> None:
        """Drop blobs of these classes; their nodes stay, and are points no more."""
        last, used = _LAST, set[int]()
        while last:
            rows: list[_Node] = []
            plan = functools.partial(self._drops, ns, last, classes, used, rows)
            with self._measured():
                self._evictor.prune(plan, self._reason)
            last = rows[-1].n - 1 if rows else 0

    def path(self, ns: int, tip: NodeId) -> None:
        """Remove the nodes of a path that no other path needs."""
        # A row that went in between would be gone, or another path's by now.
        with self._evictor.changes:
            n = self._index.find(ns, tip) or 0
            while n:
                n = self._remove(functools.partial(self._unshared, ns, n))

    def _remove(self, choose: Callable[[], tuple[list[int], int]]) -> int:
        """Remove a batch; answers with which row the next one begins, 0 for none."""
        found: list[tuple[list[int], int]] = []

        def chosen() -> list[int]:
            found.append(choose())
            return found[-1][0]

        with self._measured():
            gone = self._evictor.remove_some(chosen, self._reason)
        self._removed += gone
        [(nodes, following)] = found
        return following if gone == len(nodes) else nodes[gone]

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Add to what is freed; nobody else writes or removes in the meantime."""
        with self._evictor.changes:
            before = self._account.numbers.blobs
            try:
                yield
            finally:
                self._freed += before - self._account.numbers.blobs

    # What goes next; called with the index's lock, so that no lease comes in between.

    def _childless(self, ns: int, last: int) -> tuple[list[int], int]:
        rows, held = self._nodes(ns, last), self._held(ns)
        chosen: list[int] = []
        lost: Counter[int] = Counter()
        for node in rows:
            if not self._is_old(node):
                continue
            if node.n in held:
                self._kept[node.n] = held[node.n]
            elif node.children == lost[node.n]:
                chosen.append(node.n)
                lost[node.parent] += 1
        return chosen, rows[-1].n - 1 if rows else 0

    def _unshared(self, ns: int, tip: int) -> tuple[list[int], int]:
        held = self._held(ns)
        chosen: list[int] = []
        n, below = tip, 0
        while n and len(chosen) < self._index.rows_per_removal:
            (node,) = (_Node(*row) for row in self._index.all(_NODE, (n,)))
            if node.children > below:
                above = at_or_above(self._index, [n])
                self._kept |= dict.fromkeys(above, KeptReason.SHARED)
                return chosen, 0
            if not self._is_old(node):
                return chosen, 0
            if n in held:
                self._kept[n] = held[n]
            else:
                chosen.append(n)
            n, below = node.parent, 1
        return chosen, n

    def _drops(
        self,
        ns: int,
        last: int,
        classes: Collection[BlobClass],
        used: set[int],
        rows: list[_Node],
    ) -> Pruning:
        """Of one batch, whose rows are left in `rows`; then nothing.

        `used` collects nodes that were used through one below them.
        """
        if rows:
            return Pruning()
        rows += self._nodes(ns, last)
        held = self._held(ns)
        drops: list[Drop] = []
        for node in rows:
            if node.n in used or not self._is_old(node):
                used.add(node.parent)
                continue
            found = map(int, filter(None, (node.classes or "").split(",")))
            lost = [name for name in map(class_of, found) if name in classes]
            if lost and node.n in held:
                self._kept[node.n] = held[node.n]
            elif lost:
                drops.append(Drop(node.n, tuple(lost), frozenset()))
                self._dropped += len(lost)
        return Pruning(drops=drops)

    def _nodes(self, ns: int, last: int) -> list[_Node]:
        most = self._index.rows_per_removal
        asked = {"ns": ns, "last": last, "most": most}
        return [_Node(*row) for row in self._index.all(_NODES, asked)]

    def _is_old(self, node: _Node) -> bool:
        return self._latest is None or node.at <= self._latest

    def _held(self, ns: int) -> dict[int, KeptReason]:
        """Nodes that others hold, and all above these."""
        if self._force:
            return {}
        leases = self._evictor.leases
        pinned = at_or_above(self._index, leases.pins.rows(ns))
        leased = at_or_above(self._index, leases.rows(ns))
        return dict.fromkeys(pinned, KeptReason.PINNED) | dict.fromkeys(
            leased, KeptReason.LEASED
        )
