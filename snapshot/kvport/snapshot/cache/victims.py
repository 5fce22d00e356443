"""The order of removal: whose state makes room, and why.

In: how much room is wanted, and how namespaces stand. Out: leaves, one by one, each
with its reason; then the parents that become leaves on the way. Pure reading over the
index: a plan draws the same nodes as a removal. The order, oldest first in each step:

1. what has expired;
2. state of incompatible namespaces;
3. pointless rows: leaves that are no restore point, of layouts that need one;
4. of namespaces that hold more than their quota, pointless rows first, and those that
   become so on the way, even if that is more than is needed: nothing could use them;
5. of all, but no namespace loses its protected share to another;
6. of the namespace itself for which room is made; of all where the cap must hold.

Leased and pinned nodes never go. Leaves are read in pages, and namespaces merged as
they are read: it costs nothing how many there are.
"""

import functools
import heapq
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import attrs

from kvport.manifest.layout import StateLayout
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.demand import Demand, Victim
from kvport.snapshot.cache.index import ROOT_ROW, Index
from kvport.snapshot.cache.leases import Leases
from kvport.snapshot.cache.policies import Standing
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.restorable import is_restorable

_PAGE: Final = 64
_GLANCE: Final = 512
"""Leaves that are looked at in step 3 when a write waits."""
_COLUMNS: Final = "SELECT used, n, ns, id, parent, at, expires, kinds FROM node"
_FILES: Final = """
SELECT file.n, alloc, (SELECT count(*) FROM blob other WHERE other.file = file.n)
FROM blob JOIN file ON file.n = blob.file WHERE blob.node = ?"""


@attrs.frozen
class _Leaf:
    used: int
    n: int
    ns: int
    id: NodeId
    parent: int
    at: int
    expires: int
    kinds: int


@attrs.define
class _Loss:
    """What a parent has left, and takes over from what it lost."""

    children: int
    used: int
    at: int
    expires: int


_Order: TypeAlias = Callable[[_Leaf], tuple[int, int]]
_Step: TypeAlias = tuple[RemovalReason, Callable[[], bool], Callable[[_Leaf], bool]]
"""A reason, when it is enough, and whom it concerns."""


def _by_use(leaf: _Leaf) -> tuple[int, int]:
    return leaf.used, leaf.n


def _by_expiry(leaf: _Leaf) -> tuple[int, int]:
    return leaf.expires, leaf.n


def _all_of(n: int, may_go: Callable[[_Leaf], bool], leaf: _Leaf) -> bool:
    return leaf.ns == n and may_go(leaf)


class Choice:
    """One choice, good while no node is added, and none removed but those it named.

    Whether a node is held is asked when it is named: to be called with the index's lock
    if what it names is to be removed. A plan lets others go on, whom it would hold up
    for long: it passes by what went meanwhile, and is of no one moment then.
    """

    def __init__(
        self,
        index: Index,
        leases: Leases,
        standings: Mapping[int, Standing],
        *,
        now: int,
        unpinned: Container[int] = (),
    ) -> None:
        """Begin with nothing chosen.

        Args:
            index: where the nodes are.
            leases: that hold some.
            standings: of the namespaces that may lose state, by row.
            now: what has expired by then goes first; seconds of the epoch.
            unpinned: rows of nodes whose pins end before.
        """
        self._index: Final = index
        self._leases: Final = leases
        self._standings: Final = standings
        self._now: Final = now
        self._unpinned: Final = unpinned
        self._used: Final = {n: one.used for n, one in standings.items()}
        self._chosen: Final[set[int]] = set()
        self._lost: Final[dict[int, _Loss]] = {}
        self._bare: Final[dict[int, _Leaf]] = {}
        self._owners: Final[dict[int, int]] = {}
        self._missing = 0
        self._over: Final[list[_Step]] = []

    def victims(self, demand: Demand) -> Iterator[Victim]:
        """What goes for a demand, in order; each is taken as gone once it is named."""
        self._missing = demand.missing
        rows = [n for n in self._standings if demand.only in {None, n}]
        of_these = frozenset(rows)

        def enough(reason: RemovalReason) -> Callable[[], bool]:
            return lambda: self._missing <= 0 and reason not in demand.always

        lost = frozenset(n for n in rows if self._standings[n].incompatible is not None)
        layouts = {
            n: layout
            for n in rows
            if (layout := self._standings[n].layout) is not None
            and not layout.full_only
        }
        plain = self._oldest(layouts, plain=math.inf if demand.thorough else _GLANCE)

        def expired(leaf: _Leaf) -> bool:
            return leaf.ns in of_these and 0 < leaf.expires <= self._now

        def incompatible(leaf: _Leaf) -> bool:
            return leaf.ns in lost

        def pointless(leaf: _Leaf) -> bool:
            layout = layouts.get(leaf.ns)
            return layout is not None and self._pointless(leaf, layout)

        for reason, may_go, leaves, order in (
            (RemovalReason.EXPIRED, expired, self._expired(), _by_expiry),
            (RemovalReason.INCOMPATIBLE, incompatible, self._oldest(lost), _by_use),
            (RemovalReason.POINTLESS, pointless, plain, _by_use),
        ):
            step = (reason, enough(reason), may_go)
            yield from self._step(leaves, *step, order=order)
            self._over.append(step)
        glance = math.inf if demand.thorough else _GLANCE
        for n in rows:
            enough_of = self._within_quota(n, demand)
            if n in layouts and not enough_of():
                # All of them where nobody waits: what would be left is of no use.
                enough_plain = bool if demand.thorough else enough_of
                leaves = self._oldest([n], plain=glance)
                # Others than the namespace's own are parents that one had before.
                of_it = functools.partial(_all_of, n, pointless)
                why = RemovalReason.POINTLESS
                yield from self._step(leaves, why, enough_plain, of_it)
            yield from self._of({n}, RemovalReason.QUOTA, enough_of)
        if demand.only is None:
            yield from self._unprotected()
            yield from self._of(demand.by, RemovalReason.EVICTED)

    def over_quota(self) -> dict[int, int]:
        """Bytes that namespaces would still hold above their quotas, by row."""
        return {
            n: self._used[n] - one.quota
            for n, one in self._standings.items()
            if one.quota is not None and self._used[n] > one.quota
        }

    def _within_quota(self, n: int, demand: Demand) -> Callable[[], bool]:
        """Whether enough of a namespace went for its quota."""
        if n == demand.only:
            return lambda: self._missing <= 0
        quota = self._standings[n].quota
        always = RemovalReason.QUOTA in demand.always
        return lambda: (
            quota is None
            or self._used[n] <= quota
            or (self._missing <= 0 and not always)
        )

    def _of(
        self,
        rows: Collection[int],
        reason: RemovalReason,
        enough: Callable[[], bool] | None = None,
    ) -> Iterator[Victim]:
        return self._step(
            self._oldest(rows),
            reason,
            enough or (lambda: self._missing <= 0),
            lambda leaf: leaf.ns in rows,
        )

    def _unprotected(self) -> Iterator[Victim]:
        safe: set[int] = set()

        def may_go(leaf: _Leaf) -> bool:
            if leaf.ns in safe:
                return False
            share = self._standings[leaf.ns].share
            if share and self._used[leaf.ns] - self._own_bytes(leaf.n) < share:
                safe.add(leaf.ns)
            return leaf.ns not in safe

        return self._step(
            self._oldest(self._standings, safe),
            RemovalReason.EVICTED,
            lambda: self._missing <= 0,
            may_go,
        )

    def _step(
        self,
        leaves: Iterator[_Leaf],
        reason: RemovalReason,
        enough: Callable[[], bool],
        may_go: Callable[[_Leaf], bool],
        *,
        order: _Order = _by_use,
    ) -> Iterator[Victim]:
        """Name leaves in order, and parents that have become leaves among them."""
        if enough():
            return
        bare = [(*order(leaf), leaf) for leaf in self._bare.values()]
        heapq.heapify(bare)
        following = next(leaves, None)
        while (bare or following is not None) and not enough():
            if following is None or (bare and bare[0][:2] < order(following)):
                leaf = heapq.heappop(bare)[2]
            else:
                leaf, following = following, next(leaves, None)
            if leaf.n in self._chosen or self._held(leaf) or not may_go(leaf):
                continue
            victim, parent = self._name(leaf, reason), self._expose(leaf)
            yield victim
            while parent is not None and (why := self._earlier(parent, reason)):
                victim, parent = self._name(parent, why), self._expose(parent)
                yield victim
            if parent is not None:
                heapq.heappush(bare, (*order(parent), parent))

    def _held(self, leaf: _Leaf) -> bool:
        pinned = leaf.n not in self._unpinned
        return self._leases.holds(leaf.ns, leaf.id, pinned=pinned)

    def _earlier(self, leaf: _Leaf, step: RemovalReason) -> RemovalReason | None:
        """The reason by which a step that is over would name a new leaf.

        Else what goes would depend on where a removal is interrupted.
        """
        if self._held(leaf):
            return None
        for reason, enough, may_go in self._over:
            rest = (reason, step) == (RemovalReason.POINTLESS, RemovalReason.QUOTA)
            if (rest or not enough()) and may_go(leaf):
                return reason
        return None

    def _name(self, leaf: _Leaf, reason: RemovalReason) -> Victim:
        nbytes = self._own_bytes(leaf.n)
        for file, _, owners in self._index.all(_FILES, (leaf.n,)):
            self._owners[file] = self._owners.get(file, owners) - 1
        self._chosen.add(leaf.n)
        self._bare.pop(leaf.n, None)
        self._lost.pop(leaf.n, None)
        self._used[leaf.ns] -= nbytes
        self._missing -= nbytes
        return Victim(leaf.n, leaf.ns, reason, leaf.at, nbytes)

    def _own_bytes(self, n: int) -> int:
        """Bytes of the files that have no other node any more."""
        return sum(
            alloc
            for file, alloc, owners in self._index.all(_FILES, (n,))
            if self._owners.get(file, owners) <= 1
        )

    def _expose(self, leaf: _Leaf) -> _Leaf | None:
        """The parent of a leaf that was named, if nothing hangs on it any more.

        To be called before the leaf is removed. What is counted once is kept: the rows
        change as what was named is removed.
        """
        if leaf.parent == ROOT_ROW:
            return None
        found = self._index.all(
            "SELECT used, n, ns, id, parent, at, expires, kinds, children FROM node"
            " WHERE n = ?",
            (leaf.parent,),
        )
        if not found:
            return None
        ((*values, children),) = found
        parent = _Leaf(*values)
        loss = self._lost.setdefault(
            leaf.parent, _Loss(children, parent.used, parent.at, parent.expires)
        )
        loss.children -= 1
        loss.used, loss.at = max(loss.used, leaf.used), max(loss.at, leaf.at)
        loss.expires = _later(loss.expires, leaf.expires)
        if loss.children:
            return None
        parent = attrs.evolve(parent, used=loss.used, at=loss.at, expires=loss.expires)
        self._bare[parent.n] = parent
        return parent

    def _pointless(self, leaf: _Leaf, layout: StateLayout) -> bool:
        """Whether nothing can be restored at a leaf's end."""
        return not leaf.kinds and not is_restorable(self._index, leaf.n, layout)

    # Leaves, oldest first, read in pages.

    def _oldest(
        self,
        rows: Iterable[int],
        safe: Container[int] = (),
        plain: float | None = None,
    ) -> Iterator[_Leaf]:
        """Leaves of namespaces until they are safe; or so many plain ones of each."""
        return heapq.merge(
            *(self._oldest_of(n, safe, plain) for n in rows), key=_by_use
        )

    def _oldest_of(
        self, ns: int, safe: Container[int], plain: float | None
    ) -> Iterator[_Leaf]:
        where = "ns = ? AND children = 0"
        if plain is not None:
            where += " AND kinds = 0"
        for found, leaf in enumerate(self._paged(where, (ns,), "used")):
            if ns in safe or (plain is not None and found >= plain):
                return
            yield leaf

    def _expired(self) -> Iterator[_Leaf]:
        where = "children = 0 AND expires > 0 AND expires <= ?"
        return self._paged(where, (self._now,), "expires")

    def _paged(
        self, where: str, values: tuple[int, ...], order: str
    ) -> Iterator[_Leaf]:
        after = (-1, -1)
        while True:
            page = [
                _Leaf(*row)
                for row in self._index.all(
                    f"{_COLUMNS} WHERE {where} AND ({order}, n) > (?, ?)"
                    f" ORDER BY {order}, n LIMIT {_PAGE}",
                    (*values, *after),
                )
            ]
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1]
            after = (last.used if order == "used" else last.expires, last.n)


def _later(one: int, other: int) -> int:
    """Of two expiries the later; 0 is never."""
    return max(one, other) if one and other else 0
