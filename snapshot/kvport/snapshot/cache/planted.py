"""Planted rows: what nobody wrote here goes before anything relies on it.

In: an index that was just opened. Out: one in which all namespaces are ours, rows refer
to rows that are there, and numbers are in the range of what this program writes; how
many rows had to go, or be set right, for that.

Whoever can write to the volume can write rows, and nodes are held to their MACs only
when they are read. Until then a row must neither lead out of the root nor overflow what
is computed from it. The tables have no CHECKs for it: SQLite would find the whole
index unsound, and the cache be emptied for one row.
"""

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import StateIdentity
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.mac import NamespaceRow, RowMac
from kvport.snapshot.cache.record_index import UNFIT
from kvport.snapshot.cache.records import Namespace, RemovalReason, is_namespace_id
from kvport.snapshot.cache.stats import Counters

_log = structlog.get_logger(__name__)

_BOUNDS: Final = {
    # So that sums over as many rows as there can be stay below 2^63.
    "bytes": 1 << 40,
    "tokens": 1 << 32,
    "uses": 1 << 56,
    # From the epoch, and of lives: some 35,000 years.
    "seconds": 1 << 40,
}

_ROWS: Final = (
    # Tables on which others depend come before these.
    (
        "file",
        """ns IN (SELECT n FROM ns) AND length(digest) = 32
        AND class BETWEEN 0 AND 2 AND live BETWEEN 0 AND 1
        AND size BETWEEN 0 AND :bytes AND trailer BETWEEN 0 AND :bytes""",
    ),
    ("node", "n > 0 AND ns IN (SELECT n FROM ns)"),
    (
        "blob",
        """class BETWEEN 0 AND 2 AND EXISTS (SELECT 1 FROM node WHERE n = blob.node)
        AND EXISTS (SELECT 1 FROM file WHERE n = blob.file)""",
    ),
    (
        "attest",
        """EXISTS (SELECT 1 FROM node WHERE n = attest.node)
        AND EXISTS (SELECT 1 FROM claim WHERE n = attest.claim)""",
    ),
    (
        "pin",
        """until BETWEEN 0 AND :seconds
        AND EXISTS (SELECT 1 FROM node WHERE n = pin.node)""",
    ),
)
"""What is true of each row of ours; others are deleted."""

_VALUES: Final = {
    "file": {
        # Measured again by the sweep.
        "alloc = 0": "alloc BETWEEN 0 AND :bytes",
        "live = NOT live": """
            live = EXISTS (SELECT 1 FROM blob WHERE blob.file = file.n)""",
    },
    "node": {
        # Such a node has no place: it goes with the misplaced ones.
        'start = 0, "end" = 0': """
            start BETWEEN 0 AND :tokens AND "end" BETWEEN 0 AND :tokens""",
        # What its MAC was made of, or else it does not fit.
        "kinds = 0": "kinds BETWEEN 0 AND 15",
        # The rest is outside of the MAC.
        "used = 0": "used BETWEEN 0 AND :uses",
        "at = 0": "at BETWEEN 0 AND :seconds",
        "ttl = NULL": "ttl IS NULL OR ttl BETWEEN 0 AND :seconds",
        "expires = 0": "expires BETWEEN 0 AND :seconds",
    },
    "root": {
        "clock = 0": "clock BETWEEN 0 AND :seconds",
        "scrubbed = 0": "scrubbed >= 0",
    },
}
"""Columns that are set, and what is true of them in each row of ours."""

_MISPLACED: Final = """
SELECT ns, n FROM node WHERE ("end" > start AND CASE parent
    WHEN 0 THEN start = 0
    ELSE EXISTS (SELECT 1 FROM node above
        WHERE above.n = node.parent AND above.ns = node.ns AND above."end" = node.start)
END) IS NOT TRUE"""
_CHILDREN: Final = """
SELECT n, found FROM (
    SELECT n, children, (SELECT count(*) FROM node below INDEXED BY node_parting
        WHERE below.ns = node.ns AND below.parent = node.n) AS found FROM node)
WHERE children != found"""


def remove_planted(
    connection: sqlite3.Connection, mac: RowMac, counters: Counters
) -> None:
    """Delete rows that nothing may rely on, and set right values that are out of range.

    No file is touched: what no row speaks of any more is the sweep's.

    Args:
        connection: of the index.
        mac: what namespaces are held to.
        counters: told of nodes whose namespace goes.

    Raises:
        sqlite3.Error: the index could not be read or written.
    """
    found: Counter[str] = Counter()
    # Nothing is written where nothing is planted: the volume may be full.
    connection.execute("BEGIN")
    try:
        for n, name in _foreign_namespaces(connection, mac):
            ((nodes,),) = connection.execute(
                "SELECT count(*) FROM node WHERE ns = ?", (n,)
            )
            counters.add_removed(
                name if is_namespace_id(name) else "", RemovalReason.TAMPERED, nodes
            )
            connection.execute("DELETE FROM ns WHERE n = ?", (n,))
            found["ns"] += 1
        for table, ours in _ROWS:
            found[table] += _change(connection, table, ("DELETE FROM", table), ours)
        for table, columns in _VALUES.items():
            # All at once first: as a rule there is nothing.
            if not _is_found(connection, table, ") AND (".join(columns.values())):
                continue
            for values, ours in columns.items():
                change = ("UPDATE", table, "SET", values)
                found[table] += _change(connection, table, change, ours)
        if wrong := connection.execute(_CHILDREN).fetchall():
            # A node that has some, as is said, can never make room.
            connection.executemany("UPDATE node SET children = ?2 WHERE n = ?1", wrong)
            found["children"] += len(wrong)
        connection.execute("COMMIT" if +found else "ROLLBACK")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if planted := +found:
        _log.warning("cache_rows_tampered", **planted)


def misplaced(index: Index) -> dict[int, list[int]]:
    """Nodes that do not go on where their parents end, by namespace.

    Without them each path leads to a root, and none goes in a circle.

    Raises:
        StorageError: the index could not be read.
    """
    found: dict[int, list[int]] = {}
    for ns, n in index.all(_MISPLACED):
        found.setdefault(ns, []).append(n)
    return found


def _change(
    connection: sqlite3.Connection, table: str, change: Sequence[str], ours: str
) -> int:
    """Change all rows of which this is not true; answers how many."""
    if not _is_found(connection, table, ours):
        return 0
    sql = " ".join((*change, *_others(ours)))
    return connection.execute(sql, _BOUNDS).rowcount


def _is_found(connection: sqlite3.Connection, table: str, ours: str) -> bool:
    sql = " ".join(("SELECT 1 FROM", table, *_others(ours), "LIMIT 1"))
    return connection.execute(sql, _BOUNDS).fetchone() is not None


def _others(ours: str) -> tuple[str, str, str]:
    # What is NULL is not true either.
    return "WHERE ((", ours, ")) IS NOT TRUE"


def _foreign_namespaces(
    connection: sqlite3.Connection, mac: RowMac
) -> list[tuple[int, str]]:
    """Numbers and ids of rows that are not ours."""
    rows = connection.execute(
        "SELECT n, mac, id, identity, scope, block_size, model, source, loaded FROM ns"
    ).fetchall()
    return [
        (n, values[0])
        for n, sealed, *values in rows
        if not _is_ours(NamespaceRow(*values), sealed, mac)
    ]


def _is_ours(row: NamespaceRow, sealed: bytes, mac: RowMac) -> bool:
    try:
        if mac.namespace(row) != sealed or not is_namespace_id(row.id):
            return False
    except UNFIT:
        return False
    with contextlib.suppress(KvportError, ValueError, RecursionError):
        identity = StateIdentity.from_json(json.loads(row.identity))
        return Namespace.of(identity, row.scope, row.block_size).id == row.id
    # Of another version, which we shall not read: but ours.
    return True
