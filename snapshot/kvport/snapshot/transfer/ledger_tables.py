"""The ledger's tables, and how its one connection is opened.

In: a path. Out: a connection to tables of this format. The file is owned by one
process, and its log needs no shared memory.
"""

import os
import sqlite3
from pathlib import Path
from typing import Final

from kvport.snapshot.cache.schema import storage_errors
from kvport.snapshot.errors import StorageError
from kvport.snapshot.transfer.sessions import TABLES as SESSIONS

FORMAT: Final = 5
"""Of the tables, as SQLite's `user_version`."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_PRAGMAS: Final = (
    # Before WAL, so that SQLite makes no shared-memory file.
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA fullfsync=1",
    "PRAGMA checkpoint_fullfsync=1",
    "PRAGMA temp_store=MEMORY",
    "PRAGMA trusted_schema=0",
)
_TABLES: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE artifact (
    id TEXT NOT NULL, direction TEXT NOT NULL, namespace TEXT NOT NULL,
    scope TEXT NOT NULL, model TEXT NOT NULL, issuer TEXT NOT NULL,
    origins TEXT NOT NULL,
    created TEXT NOT NULL, expires TEXT NOT NULL, tokens INTEGER NOT NULL,
    size INTEGER NOT NULL, tip BLOB NOT NULL, envelope BLOB NOT NULL,
    inside BLOB NOT NULL, content_key BLOB NOT NULL, identity BLOB NOT NULL,
    prefix BLOB NOT NULL,
    recorded TEXT NOT NULL, encoder TEXT NOT NULL, status TEXT NOT NULL,
    PRIMARY KEY (id, direction, scope)
);
CREATE TABLE removed (
    n INTEGER PRIMARY KEY, namespace TEXT NOT NULL, key BLOB NOT NULL,
    reason TEXT NOT NULL, at TEXT NOT NULL, UNIQUE (namespace, key)
);
{SESSIONS}
PRAGMA user_version={FORMAT};
COMMIT;
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open the ledger's file, or make it; any thread may use the connection, in turn.

    Raises:
        StorageError: it cannot be read, is in use, or is of another format.
    """
    try:
        # Made here and not by SQLite, so that it is never open to others.
        os.close(os.open(path, _FLAGS, 0o600))
    except OSError as error:
        raise StorageError("the ledger cannot be opened") from error
    with storage_errors():
        # A second owner is not worth waiting for.
        connection = sqlite3.connect(
            path, timeout=0, check_same_thread=False, isolation_level=None
        )
        try:
            for pragma in _PRAGMAS:
                connection.execute(pragma).fetchall()
            _make_tables(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    ((found,),) = connection.execute("PRAGMA user_version").fetchall()
    if found == 0:
        connection.executescript(_TABLES)
    elif found != FORMAT:
        raise StorageError("the ledger is of another format")
