"""The index's tables, and how its one connection is opened.

In: a path. Out: a connection to a sound index of this format, or `IndexLostError`; one
that was made with another home's key is left alone.

`locking_mode=EXCLUSIVE` keeps SQLite from making a shared-memory file, which
would raise SIGBUS when a volume vanishes. `fullfsync` matters on macOS only.
Checkpoints are made by index.py, where the account can reserve their growth first.
"""

import contextlib
import functools
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.snapshot.cache.account import BLOCK
from kvport.snapshot.cache.blob_stream import UnfitFileError
from kvport.snapshot.cache.companions import (
    check_fit,
    clear_suspicion,
    is_suspect,
    log_of,
    make_fit,
)
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.regular import create as create_file
from kvport.snapshot.errors import DiskFullError, ForeignRootError, StorageError

FORMAT: Final = 2
"""Of root.json, the directory tree and these tables together."""

THOROUGH_BYTES: Final = 64 * MIB
"""Up to here an index is read whole at each start: about half a second."""

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
    "PRAGMA cell_size_check=1",
    f"PRAGMA cache_size=-{16 * 1024}",
)

_NEW_PRAGMAS: Final = (
    # Not when it is opened again: that would write, and so fail on a full volume.
    _PRAGMAS[0],
    f"PRAGMA page_size={BLOCK}",
    "PRAGMA auto_vacuum=INCREMENTAL",
    *_PRAGMAS[1:],
)

# Rows refer to each other by number: 3 bytes where an id takes 32. Ids and digests are
# indexed by their first bytes only; index.py sees to it, under its lock, that they are
# unique. `children` and `used` keep a namespace's oldest leaf one index step away, and
# the oldest that may be no restore point: one without a kind. Times are
# seconds from the epoch; `at` is that of the last use, `expires` is 0 for never, `ttl`
# NULL for the namespace's. `clock` is the latest time seen, `scrubbed` the row of the
# last file that a scrub has checked, `completed` when it had checked all.
# `size` of a file is its blob's, `trailer` what follows: its tokens' ids.
_TABLES: Final = """
BEGIN IMMEDIATE;
CREATE TABLE root (
    id TEXT NOT NULL, format INTEGER NOT NULL, mac BLOB NOT NULL,
    clock INTEGER NOT NULL DEFAULT 0, scrubbed INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE ns (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, identity TEXT NOT NULL,
    scope TEXT NOT NULL, block_size INTEGER NOT NULL,
    model TEXT NOT NULL DEFAULT '', source TEXT NOT NULL DEFAULT '',
    loaded INTEGER NOT NULL DEFAULT 0, mac BLOB NOT NULL DEFAULT x''
) STRICT;
CREATE TABLE node (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, id BLOB NOT NULL,
    parent INTEGER NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL,
    key BLOB NOT NULL, first_token INTEGER NOT NULL, kinds INTEGER NOT NULL,
    children INTEGER NOT NULL, used INTEGER NOT NULL, at INTEGER NOT NULL,
    ttl INTEGER, expires INTEGER NOT NULL DEFAULT 0,
    mac BLOB NOT NULL DEFAULT x''
) STRICT;
CREATE INDEX node_id ON node (ns, substr(id, 1, 8));
CREATE INDEX node_whole ON node (ns, parent, "end", substr(key, 1, 8));
CREATE INDEX node_parting ON node (ns, parent, first_token);
CREATE INDEX node_leaf ON node (ns, used) WHERE children = 0;
CREATE INDEX node_plain ON node (ns, used) WHERE children = 0 AND kinds = 0;
CREATE INDEX node_expiry ON node (expires) WHERE children = 0 AND expires > 0;
CREATE TABLE pin (
    node INTEGER NOT NULL, owner TEXT NOT NULL, until INTEGER NOT NULL,
    PRIMARY KEY (node, owner)
) STRICT, WITHOUT ROWID;
CREATE TABLE file (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, digest BLOB NOT NULL,
    class INTEGER NOT NULL, size INTEGER NOT NULL, trailer INTEGER NOT NULL,
    alloc INTEGER NOT NULL, live INTEGER NOT NULL
) STRICT;
CREATE INDEX file_digest ON file (ns, substr(digest, 1, 8));
CREATE INDEX file_deleting ON file (live) WHERE live = 0;
CREATE TABLE blob (
    node INTEGER NOT NULL, class INTEGER NOT NULL, file INTEGER NOT NULL,
    PRIMARY KEY (node, class)
) STRICT, WITHOUT ROWID;
CREATE INDEX blob_file ON blob (file);
CREATE TABLE numerics (n INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE claim (
    n INTEGER PRIMARY KEY, lineage TEXT NOT NULL, numerics INTEGER NOT NULL,
    origins TEXT NOT NULL, UNIQUE (lineage, numerics, origins)
) STRICT;
CREATE TABLE attest (
    node INTEGER NOT NULL, claim INTEGER NOT NULL, PRIMARY KEY (node, claim)
) STRICT, WITHOUT ROWID;
INSERT INTO root (id, format, mac) VALUES ('{root_id}', {format}, x'{mac}');
COMMIT;
"""


_SPINES: Final = (
    # Those that a start reads to the end.
    "SELECT total(alloc) FROM file",
    "SELECT max(used) FROM node",
    "SELECT * FROM ns",
    "SELECT * FROM blob LIMIT 1",
    "SELECT * FROM attest LIMIT 1",
)
"""Reads that find damage in time to empty the cache instead of failing later."""

_KIND_BITS: Final = {
    PointKind.STRIDE: 1,
    PointKind.FORK: 2,
    PointKind.PROMPT: 4,
    PointKind.REPLY: 8,
}
"""How `node.kinds` stands for a set of kinds."""


_CLASS_NUMBERS: Final = {
    BlobClass.KV: 0,
    BlobClass.WINDOW: 1,
    BlobClass.STATE: 2,
}
"""How `blob.class` stands for a class."""
_CLASSES: Final = {number: name for name, number in _CLASS_NUMBERS.items()}


class IndexLostError(Exception):
    """The index is missing, corrupt, or of another root; the cache is emptied."""


def kind_bits(kinds: Iterable[PointKind]) -> int:
    """The one number that stands for a set of kinds."""
    return sum(_KIND_BITS[kind] for kind in kinds)


@functools.lru_cache(maxsize=64)
def kinds_of(bits: int) -> frozenset[PointKind]:
    """The kinds that a number stands for."""
    return frozenset(kind for kind, bit in _KIND_BITS.items() if bits & bit)


def class_number(blob_class: BlobClass) -> int:
    """The number that stands for a class."""
    return _CLASS_NUMBERS[blob_class]


def class_of(number: int) -> BlobClass:
    """The class that a number stands for.

    Raises:
        KeyError: it stands for none.
    """
    return _CLASSES[number]


def create(path: Path, root_id: str, mac: bytes) -> sqlite3.Connection:
    """Make a new index, where there is none.

    Args:
        path: of the index.
        root_id: of the root that it describes.
        mac: says whose it is (see `mac.RowMac.root`).

    Raises:
        StorageError: the volume refused.
    """
    with storage_errors(), storage_io():
        # Else SQLite would take whatever has come there meanwhile.
        os.close(create_file(path.parent, path))
        connection = _connect(path, _NEW_PRAGMAS)
        try:
            connection.executescript(_tables(root_id, mac))
            clear_suspicion(path)
        except BaseException:
            connection.close()
            raise
        return connection


def connect(path: Path, root_id: str, mac: bytes) -> sqlite3.Connection:
    """Open an index that must be there, whole, and this root's.

    A large one is read whole only after an end that was no clean one; what is damaged
    in between shows when it is used, and then at the next start.

    Args:
        path: of the index.
        root_id: of the root that it must describe.
        mac: as it was made with.

    Raises:
        IndexLostError: it is not.
        ForeignRootError: it was made with another home's key.
        StorageError: the volume refused, or someone else has it open.
    """
    with storage_io():
        try:
            clean = not make_fit(path)
        except FileNotFoundError as error:
            raise IndexLostError("missing") from error
        except UnfitFileError as error:
            raise IndexLostError("not a file") from error
        logged = log_of(path).exists()
        size = path.stat().st_size
        if not size and not logged:
            raise IndexLostError("empty")
        clean = clean and not logged and not is_suspect(path)
    spared = clean and size > THOROUGH_BYTES
    with corruption():
        connection = _connect(path, _PRAGMAS)
    try:
        # Nothing is written yet: what came between the look and SQLite is found.
        with storage_io():
            check_fit(path)
        with corruption():
            (_check_spines if spared else _check_pages)(connection)
            _check_schema(connection)
            _check_owner(connection, root_id, mac)
        with storage_io():
            clear_suspicion(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _tables(root_id: str, mac: bytes) -> str:
    return _TABLES.format(root_id=root_id, format=FORMAT, mac=mac.hex())


@contextlib.contextmanager
def corruption() -> Iterator[None]:
    """Tell a lost index, which is emptied, from a volume that fails, which is not.

    Raises:
        IndexLostError: the index is no sound one.
        DiskFullError: the volume is full.
        StorageError: it refused.
    """
    try:
        with storage_errors():
            yield
    except StorageError as error:
        code = getattr(error.__cause__, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _LOST:
            raise IndexLostError("corrupt") from error
        raise


def _check_pages(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise IndexLostError("corrupt")


def _check_spines(connection: sqlite3.Connection) -> None:
    """What can be seen of a database without reading all of it."""
    for statement in _SPINES:
        connection.execute(statement).fetchall()


def _check_schema(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone() != (0,):
        raise IndexLostError("of another version")
    with contextlib.closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(_tables("", b""))
        if _schema_of(connection) != _schema_of(ours):
            raise IndexLostError("of another schema")


def _check_owner(connection: sqlite3.Connection, root_id: str, mac: bytes) -> None:
    # All values as bytes: text that is none would be an error without a code.
    found = connection.execute(
        "SELECT CAST(id AS BLOB), CAST(format AS BLOB), mac FROM root"
    ).fetchall()
    if [row[:2] for row in found] != [(root_id.encode(), str(FORMAT).encode())]:
        raise IndexLostError("of another root")
    if found[0][2] != mac:
        raise ForeignRootError(
            "the cache belongs to another home's key: name another --cache-dir,"
            " or remove this directory yourself"
        )


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
        raise in_our_words(error) from error


def in_our_words(error: sqlite3.Error) -> DiskFullError | StorageError:
    """The error that stands for one of SQLite's."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return DiskFullError("the index could not grow")
    if is_corruption(error):
        return StorageError("the index is damaged, which the next start will mend")
    return StorageError("the index could not be read or written")


def is_corruption(error: sqlite3.Error) -> bool:
    """Whether it speaks of a file that is no sound database."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _connect(path: Path, pragmas: Iterable[str]) -> sqlite3.Connection:
    # Guarded by the index's lock, so that any thread may use it.
    connection = sqlite3.connect(
        path, timeout=1, check_same_thread=False, isolation_level=None
    )
    # Planted text may be none: then it fits no MAC, and is no error of the volume.
    connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
    try:
        for pragma in pragmas:
            connection.execute(pragma).fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
