"""Restorable: whether the state at a node's end can be restored.

In: a node, and the layout of its namespace. Out: yes or no, by the blobs that it and
its path have. Where all layers are full, each row is a restore point.
"""

from typing import Final

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.cache.index import ROOT_ROW, Index
from kvport.snapshot.cache.schema import class_number

_STORED: Final = """
SELECT start, "end", parent,
    EXISTS (SELECT 1 FROM blob WHERE node = node.n AND class = ?),
    EXISTS (SELECT 1 FROM blob WHERE node = node.n AND class = ?)
FROM node WHERE n = ?"""
_STATE: Final = class_number(BlobClass.STATE)
_WINDOW: Final = class_number(BlobClass.WINDOW)


def is_restorable(index: Index, n: int, layout: StateLayout) -> bool:
    """Whether all is stored that a restore at a node's end needs.

    What has gone meanwhile is no reason to say no.

    Args:
        index: whose lock is held, unless the path is.
        n: row of the node.
        layout: of its states.

    Raises:
        StorageError: the index could not be read.
    """
    if layout.full_only:
        return True
    need = WindowCoverage.of(layout)
    end, above = 0, n
    while above != ROOT_ROW:
        found = index.all(_STORED, (_STATE, _WINDOW, above))
        if not found:
            return True
        ((start, upto, parent, state, window),) = found
        if above == n:
            end = upto
            if layout.has(BlobClass.STATE) and not state:
                return False
        if not window and need.includes(start, upto, end):
            return False
        if start <= end - need.window and not need.head:
            return True
        above = parent
    return True


def last_restorable(index: Index, n: int, layout: StateLayout) -> int | None:
    """The node nearest to the end of a path that can be restored; None if none can.

    Args:
        index: whose lock is held, unless the path is.
        n: row of the path's last node.
        layout: of its states.

    Raises:
        StorageError: the index could not be read.
    """
    while n != ROOT_ROW:
        if is_restorable(index, n, layout):
            return n
        found = index.all("SELECT parent FROM node WHERE n = ?", (n,))
        n = found[0][0] if found else ROOT_ROW
    return None
