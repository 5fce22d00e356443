"""Expiry: which state is current.

In: nodes with a time to live, their own or their namespace's, that every use renews.
Out: whether a node may be read. A node lives as long as the longest
of what is below it, pins included, so that a path never loses its head. What has
expired is a miss before any of its files is opened, whether it was removed yet or not.
While the clock is behind, what ever expires is not read, and none of it is removed.
"""

import json
from collections.abc import Sequence
from typing import Final

from kvport.snapshot.cache.index import Index

_CURRENT: Final = """
WITH RECURSIVE
down(n) AS (
    SELECT value FROM json_each(:rows) UNION
    SELECT node.n FROM down JOIN node ON node.ns = :ns AND node.parent = down.n
    LIMIT :most),
up(n) AS (
    SELECT node.n FROM down JOIN node ON node.n = down.n
    WHERE expires = 0 OR expires > :now
    OR node.n IN (SELECT value FROM json_each(:renewed))
    OR EXISTS (SELECT 1 FROM pin WHERE pin.node = node.n AND until > :now) UNION
    SELECT node.parent FROM up JOIN node ON node.n = up.n WHERE node.parent != 0)
SELECT n FROM up"""
_MOST: Final = 1 << 14
"""Nodes that are asked at once; what lies below more than these counts as expired."""


def first_current(index: Index, rows: Sequence[int]) -> int | None:
    """The first of these nodes that has not expired, nor all below it; None for none.

    Costs the first one's row, unless its own time has come. All are of one namespace.
    """
    if not rows:
        return None
    with index.lock:
        now = index.clock.reading
        ((ns, expires),) = index.all(
            "SELECT ns, expires FROM node WHERE n = ?", (rows[0],)
        )
        if expires == 0 or expires > now:
            return rows[0]
        asked = {
            "rows": json.dumps(list(rows)),
            "renewed": json.dumps(index.renewed(now)),
            "ns": ns,
            "now": now,
            "most": _MOST,
        }
        current = {n for (n,) in index.all(_CURRENT, asked)}
        return next((n for n in rows if n in current), None)
