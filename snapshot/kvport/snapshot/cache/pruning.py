"""Pruning: what retention takes from a stored path, and from beside it.

In: a path's end. Out: nodes that go, none of them at or above a leased or pinned one,
and blobs and kinds to drop from nodes that stay, none of them at or above one that is
being read, nor such that a pinned one needs.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.leases import Leases
from kvport.snapshot.cache.retention import PathNode, Retention, Verdict, judge
from kvport.snapshot.cache.schema import class_of, kind_bits, kinds_of

_PATH: Final = """
WITH RECURSIVE up(n, depth) AS (
    SELECT :tip, 0 UNION ALL
    SELECT node.parent, up.depth + 1 FROM up JOIN node ON node.n = up.n
    WHERE node.parent != 0)
SELECT node.n, start, "end", kinds, children,
    coalesce((SELECT group_concat(class) FROM blob WHERE blob.node = node.n), '')
FROM up JOIN node ON node.n = up.n ORDER BY up.depth DESC"""
_ABOVE: Final = """
WITH RECURSIVE up(n) AS (
    SELECT value FROM json_each(?) UNION
    SELECT node.parent FROM up JOIN node ON node.n = up.n WHERE node.parent != 0)
SELECT n FROM up"""
_OF_KINDS: Final = """
SELECT EXISTS (SELECT 1 FROM node
    WHERE n IN (SELECT value FROM json_each(?)) AND kinds & ?)"""
_FIRST: Final = """
SELECT min("end") FROM node
    WHERE n IN (SELECT value FROM json_each(?)) AND kinds & ?"""
_OPENING: Final = 64
"""Tokens with which a template opens a reply, at most."""


@attrs.frozen
class Drop:
    """Blobs that a node loses, and the kinds that it keeps."""

    n: int
    classes: tuple[BlobClass, ...]
    kinds: frozenset[PointKind]


@attrs.frozen
class Pruning:
    """What is to go: `nodes` whole, children before parents, and parts of others."""

    nodes: Sequence[int] = ()
    drops: Sequence[Drop] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.nodes or self.drops)


@attrs.frozen
class _Row:
    n: int
    node: PathNode
    classes: tuple[BlobClass, ...]


def prunable(
    index: Index,
    leases: Leases,
    *,
    ns: int,
    layout: StateLayout,
    tip: NodeId,
    retention: Retention,
) -> Pruning:
    """What retention takes now from the path that ends at `tip`; nothing if it is gone.

    To be called with the index's lock, so that no lease comes in between. What goes may
    set free more: ask again until nothing is left.
    """
    n = index.find(ns, tip)
    if n is None:
        return Pruning()
    held, pinned = leases.rows(ns), leases.pins.rows(ns)
    path = list(_path(index, n, frozenset(held), frozenset(pinned)))
    need = WindowCoverage.of(layout)
    verdicts = judge([row.node for row in path], retention, need)
    kept = at_or_above(index, [*held, *pinned])
    read = at_or_above(index, leases.rows(ns, reading=True))
    dead = _dead(index, ns, path, verdicts, kept)
    drops = (
        _drop(row, verdict)
        for row, verdict in zip(path, verdicts, strict=True)
        if row.n not in read
    )
    return Pruning(
        nodes=index.subtree(ns, dead)[::-1] if dead else (),
        drops=[drop for drop in drops if drop is not None],
    )


def _path(
    index: Index, tip: int, held: frozenset[int], pinned: frozenset[int]
) -> Iterator[_Row]:
    for n, start, end, kinds, children, classes in index.all(_PATH, {"tip": tip}):
        # What a running request has not stored yet will hang where its lease is.
        hanging = children + (n in held)
        yield _Row(
            n=n,
            node=PathNode(start, end, kinds_of(kinds), hanging, n in pinned),
            classes=tuple(class_of(int(c)) for c in classes.split(",") if c),
        )


def at_or_above(index: Index, rows: Sequence[int]) -> set[int]:
    """These nodes and all that their paths consist of."""
    return {n for (n,) in index.all(_ABOVE, (json.dumps(list(rows)),))}


def _drop(row: _Row, verdict: Verdict) -> Drop | None:
    point = bool(verdict.kinds) or row.node.pinned
    lost = {BlobClass.STATE: not point, BlobClass.WINDOW: not verdict.window}
    classes = tuple(c for c in row.classes if lost.get(c, False))
    if not classes and verdict.kinds == row.node.kinds:
        return None
    return Drop(row.n, classes, verdict.kinds)


def _dead(
    index: Index,
    ns: int,
    path: Sequence[_Row],
    verdicts: Sequence[Verdict],
    kept: set[int],
) -> list[int]:
    """Roots of dead branches."""
    on_path = {row.n for row in path}
    return [
        child
        for row, verdict in zip(path, verdicts, strict=True)
        if verdict.passed and row.node.children > 1
        for (child,) in index.all(
            "SELECT n FROM node WHERE ns = ? AND parent = ?", (ns, row.n)
        )
        if child not in on_path
        and child not in kept
        and _is_dead(index, index.subtree(ns, [child]), row.node.end)
    ]


def _is_dead(index: Index, nodes: Sequence[int], fork: int) -> bool:
    """Whether a branch is a prompt that was opened for a reply, and its reply."""
    these = json.dumps(list(nodes))
    ((forks,),) = index.all(_OF_KINDS, (these, kind_bits([PointKind.FORK])))
    ((prompt,),) = index.all(_FIRST, (these, kind_bits([PointKind.PROMPT])))
    return not forks and prompt is not None and prompt <= fork + _OPENING
