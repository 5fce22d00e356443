"""The index's tables, and how its one connection is opened.

In: a path. Out: a connection to a sound index of this format, or `IndexLostError`.

`locking_mode=EXCLUSIVE` keeps SQLite from making a shared-memory file, which
would raise SIGBUS when a volume vanishes. `fullfsync` matters on macOS only.
Checkpoints are made by index.py, where the account can reserve their growth first.
"""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvport.manifest.identity import PointKind
from kvport.snapshot.cache.account import BLOCK
from kvport.snapshot.errors import DiskFullError, StorageError

FORMAT: Final = 1
"""Of root.json, the directory tree and these tables together."""

_LOST: Final = frozenset(
    # The last is "no such column": a database, but not ours.
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_ERROR,
    }
)
"""Primary result codes that speak of the file's content."""

_PRAGMAS: Final = (
    # First: whatever reads the file before it makes the shared-memory file.
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA fullfsync=1",
    "PRAGMA checkpoint_fullfsync=1",
    "PRAGMA wal_autocheckpoint=0",
    # No temporary files, inside the root or outside of it.
    "PRAGMA temp_store=MEMORY",
    "PRAGMA trusted_schema=0",
)

_NEW_PRAGMAS: Final = (
    # Not when it is opened again: that would write, and so fail on a full volume.
    _PRAGMAS[0],
    f"PRAGMA page_size={BLOCK}",
    "PRAGMA auto_vacuum=INCREMENTAL",
    *_PRAGMAS[1:],
)

# Nodes refer to each other by rowid: 8 bytes where an id takes 32, twice per node.
# `children` and `used` keep the oldest leaf one index step away.
_TABLES: Final = """
BEGIN IMMEDIATE;
CREATE TABLE root (id TEXT NOT NULL, format INTEGER NOT NULL);
CREATE TABLE ns (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, identity TEXT NOT NULL,
    scope TEXT NOT NULL, block_size INTEGER NOT NULL
);
CREATE TABLE node (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, id BLOB NOT NULL,
    parent INTEGER NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL,
    key BLOB NOT NULL, first_token INTEGER NOT NULL, kinds INTEGER NOT NULL,
    children INTEGER NOT NULL, used INTEGER NOT NULL, tokens BLOB NOT NULL,
    UNIQUE (ns, id)
);
CREATE INDEX node_walk ON node (ns, parent, first_token);
CREATE INDEX node_leaf ON node (used) WHERE children = 0;
CREATE TABLE file (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, digest BLOB NOT NULL,
    size INTEGER NOT NULL, alloc INTEGER NOT NULL, live INTEGER NOT NULL,
    UNIQUE (ns, digest)
);
CREATE INDEX file_deleting ON file (live) WHERE live = 0;
CREATE TABLE blob (
    node INTEGER NOT NULL, class TEXT NOT NULL, file INTEGER NOT NULL,
    PRIMARY KEY (node, class)
) WITHOUT ROWID;
CREATE INDEX blob_file ON blob (file);
CREATE TABLE numerics (n INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE);
CREATE TABLE attest (
    node INTEGER NOT NULL, lineage TEXT NOT NULL, numerics INTEGER NOT NULL,
    origins TEXT NOT NULL, PRIMARY KEY (node, lineage, numerics, origins)
) WITHOUT ROWID;
INSERT INTO root VALUES ('{root_id}', {format});
COMMIT;
"""


_KIND_BITS: Final = {
    PointKind.STRIDE: 1,
    PointKind.FORK: 2,
    PointKind.PROMPT: 4,
    PointKind.REPLY: 8,
}
"""How `node.kinds` stands for a set of kinds."""


class IndexLostError(Exception):
    """The index is missing, corrupt, or of another root; the cache is emptied."""


def kind_bits(kinds: Iterable[PointKind]) -> int:
    """The one number that stands for a set of kinds."""
    return sum(_KIND_BITS[kind] for kind in kinds)


def kinds_of(bits: int) -> frozenset[PointKind]:
    """The kinds that a number stands for."""
    return frozenset(kind for kind, bit in _KIND_BITS.items() if bits & bit)


def create(path: Path, root_id: str) -> sqlite3.Connection:
    """Make a new index, where there is none.

    Raises:
        StorageError: the volume refused.
    """
    with storage_errors():
        connection = _connect(path, _NEW_PRAGMAS)
        try:
            path.chmod(0o600)
            connection.executescript(_TABLES.format(root_id=root_id, format=FORMAT))
        except BaseException:
            connection.close()
            raise
        return connection


def connect(path: Path, root_id: str) -> sqlite3.Connection:
    """Open an index that must be there, whole, and this root's.

    Raises:
        IndexLostError: it is not.
        StorageError: the volume refused, or someone else has it open.
    """
    log = path.with_name(f"{path.name}-wal")
    if not os.path.lexists(path):
        raise IndexLostError("missing")
    for file in (path, log):
        # A database without the log of its last commits is not whole either.
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise IndexLostError("not a file")
    if not path.stat().st_size and not log.exists():
        raise IndexLostError("empty")
    with _corruption():
        connection = _connect(path, _PRAGMAS)
    try:
        with _corruption():
            _check(connection, root_id)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _corruption() -> Iterator[None]:
    """Tell a lost index, which is emptied, from a volume that fails, which is not."""
    try:
        with storage_errors():
            yield
    except StorageError as error:
        code = getattr(error.__cause__, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _LOST:
            raise IndexLostError("corrupt") from error
        raise


def _check(connection: sqlite3.Connection, root_id: str) -> None:
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise IndexLostError("corrupt")
    if connection.execute("PRAGMA user_version").fetchone() != (0,):
        raise IndexLostError("of another version")
    # All values as bytes: text that is none would be an error without a code.
    with contextlib.closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(_TABLES.format(root_id=root_id, format=FORMAT))
        if _schema_of(connection) != _schema_of(ours):
            raise IndexLostError("of another schema")
    found = connection.execute(
        "SELECT CAST(id AS BLOB), CAST(format AS BLOB) FROM root"
    ).fetchall()
    if found != [(root_id.encode(), str(FORMAT).encode())]:
        raise IndexLostError("of another root")


def _schema_of(connection: sqlite3.Connection) -> set[tuple[bytes, bytes, bytes]]:
    """Tables, indexes and whatever else there is, as they were written down."""
    rows = connection.execute(
        "SELECT CAST(type AS BLOB), CAST(name AS BLOB),"
        " CAST(coalesce(sql, '') AS BLOB) FROM sqlite_master"
    )
    return {(kind, name, b" ".join(sql.split())) for kind, name, sql in rows}


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Say SQLite's errors in our words.

    Raises:
        DiskFullError: the volume is full.
        StorageError: anything else that SQLite or the file system refused.
    """
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise DiskFullError("the index could not grow") from error
        raise StorageError("the index could not be read or written") from error


def _connect(path: Path, pragmas: Iterable[str]) -> sqlite3.Connection:
    # Guarded by the index's lock, so that any thread may use it.
    connection = sqlite3.connect(
        path, timeout=1, check_same_thread=False, isolation_level=None
    )
    try:
        for pragma in pragmas:
            connection.execute(pragma).fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
