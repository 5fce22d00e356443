"""The choice of what is evicted: least recently used leaves, from a path's end.

In: bytes that are missing. Out: rows to remove, children before their parents.
"""

import heapq
import sys

import attrs

from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.index import ROOT_ROW, Index
from kvport.snapshot.cache.leases import Leases


@attrs.frozen(order=True)
class _Leaf:
    used: int
    n: int
    ns: int
    id: NodeId
    parent: int


def oldest(index: Index, leases: Leases, missing: int) -> list[int]:
    """Rows of leaves whose files have `missing` bytes, or of as many as go at once.

    Unleased ones, least recently used first, and parents that become leaves on the way.
    To be called with the index's lock, so that no lease comes in between.
    """
    limit = index.rows_per_removal
    fetched = limit + len(leases)
    leaves = _leaves(index, fetched)
    horizon = leaves[-1].used if len(leaves) == fetched else sys.maxsize
    heap = [leaf for leaf in leaves if not leases.holds(leaf.ns, leaf.id)]
    heapq.heapify(heap)
    chosen: list[int] = []
    lost: dict[int, int] = {}
    # A parent's recency may lie beyond leaves that were not fetched: stop there.
    while heap and missing > 0 and len(chosen) < limit and heap[0].used <= horizon:
        leaf = heapq.heappop(heap)
        chosen.append(leaf.n)
        missing -= sum(file.alloc for file in index.own_files(leaf.n))
        if leaf.parent == ROOT_ROW:
            continue
        lost[leaf.parent] = lost.get(leaf.parent, 0) + 1
        parent, children = _node(index, leaf.parent, leaf.used)
        if lost[leaf.parent] == children and not leases.holds(parent.ns, parent.id):
            heapq.heappush(heap, parent)
    return chosen


def _leaves(index: Index, count: int) -> list[_Leaf]:
    rows = index.all(
        "SELECT used, n, ns, id, parent FROM node WHERE children = 0"
        " ORDER BY used LIMIT ?",
        (count,),
    )
    return [_Leaf(used, n, ns, NodeId(i), p) for used, n, ns, i, p in rows]


def _node(index: Index, n: int, used: int) -> tuple[_Leaf, int]:
    ((own, ns, node, parent, children),) = index.all(
        "SELECT used, ns, id, parent, children FROM node WHERE n = ?", (n,)
    )
    return _Leaf(max(own, used), n, ns, NodeId(node), parent), children
