"""Lifetimes: when nodes expire that go by their namespace's time to live.

In: a namespace's ttl, whenever it is set. Out: rows whose expiry follows from it. A
longer one, or none, makes state current again that a shorter one had let expire, as
long as that was not removed.

A life begins with the last use, not with the storing: what waits in memory may have
expired before it is stored, and then is not.
"""

import contextlib
import functools
import json
import math
from typing import Final

from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.index import Index
from kvport.snapshot.errors import GoneError, StorageError


class Lifetimes:
    """Of what is not stored yet; times are seconds from the epoch.

    Who computes asks for `now` and `is_over`: they wait for no lock, nor volume.
    """

    def __init__(self, index: Index) -> None:
        self._index: Final = index

    def now(self) -> int:
        """The time."""
        return self._index.clock.latest

    def is_over(self, namespace_id: str, ttl: int | None, used: int) -> bool:
        """Whether what was last used then, with this ttl, has expired by now."""
        return self._end(namespace_id, ttl, used) <= self._index.clock.latest

    def is_current(self, namespace_id: str, ttl: int | None, used: int) -> bool:
        """Whether it may be read: not while the clock is behind, if it ever expires."""
        with self._index.lock:
            return self._end(namespace_id, ttl, used) > self._index.clock.reading

    def renew(self, ns: int, node: NodeId, used: int) -> None:
        """Let a node live on from this use, unless it is gone, or the volume is.

        One that never expires is left alone: nothing is written for it.
        """
        with contextlib.suppress(StorageError), self._index.lock:
            for (n,) in self._index.all(
                "SELECT n FROM node WHERE n = ? AND expires > 0",
                (self._index.find(ns, node),),
            ):
                self._index.touch(n, used)

    def _end(self, namespace_id: str, ttl: int | None, used: int) -> float:
        seconds = self._index.ttls.get(namespace_id) if ttl is None else ttl
        return math.inf if seconds is None else used + seconds


def apply_ttl(
    index: Index, evictor: Evictor, namespace_id: str, ttl: int | None
) -> None:
    """Let nodes of a namespace that have no ttl of their own live as long as this.

    Counted from each node's last use, in batches; to be called once after every start
    as well, since nodes are renewed by what was last set.

    Args:
        index: where the nodes are.
        evictor: under whose lock they are changed.
        namespace_id: of one that exists, or that may come to be.
        ttl: seconds after the last use; None for ever.

    Raises:
        DiskFullError: the index cannot grow for it.
        StorageError: the index could not be written.
    """
    with index.lock:
        if ttl is None:
            index.ttls.pop(namespace_id, None)
        else:
            index.ttls[namespace_id] = ttl
    try:
        ns = index.namespace_row(namespace_id)
    except GoneError:
        return
    last: int | None = 0
    while last is not None:
        with evictor.changes:
            batch = functools.partial(_apply, index, ns, ttl, last)
            last = evictor.relieved(batch)


def _apply(index: Index, ns: int, ttl: int | None, after: int) -> int | None:
    """Of the next nodes after this row; answers the last, None if there are no more."""
    asked = {"ns": ns, "ttl": ttl, "after": after, "most": index.rows_per_removal}
    with index.lock:
        index.store_touched()
        rows = index.all(
            "SELECT n FROM node WHERE ns = :ns AND ttl IS NULL AND n > :after"
            " AND expires != coalesce(at + :ttl, 0) ORDER BY n LIMIT :most",
            asked,
        )
        if not rows:
            return None
        with index.transaction():
            index.all(
                "UPDATE node SET expires = coalesce(at + :ttl, 0)"
                " WHERE n IN (SELECT value FROM json_each(:rows))",
                {"ttl": ttl, "rows": json.dumps([n for (n,) in rows])},
            )
    return int(rows[-1][0])
