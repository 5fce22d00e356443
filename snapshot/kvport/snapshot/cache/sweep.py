"""Start: make rows and files agree again after whatever ended the last process.

In: an open index, or a lost one. Out: every row has its file, every file its row, the
account equals what the disk holds. What does not agree goes, counted and logged.
"""

import contextlib
import functools
import os
import sqlite3
from pathlib import Path
from typing import Final

import attrs
import structlog

from kvport.snapshot.cache import schema
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import (
    Files,
    remove_tree,
    storage_io,
    tree_allocated,
)
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import DiskFullError

INDEX_NAME: Final = "index.sqlite"

_log = structlog.get_logger(__name__)


@attrs.frozen
class _Row:
    n: int
    digest: bytes
    size: int
    alloc: int


def open_index(
    files: Files, root_id: str, ballast: Ballast, counters: Counters, *, fresh: bool
) -> sqlite3.Connection:
    """Open the index; one that is lost empties the cache.

    Raises:
        StorageError: the volume refused.
    """
    path = files.root / INDEX_NAME
    try:
        try:
            return schema.connect(path, root_id)
        except DiskFullError:
            # Opening may have to write, as after a crash; the sweep makes more room.
            if not ballast.drop():
                raise
        return schema.connect(path, root_id)
    except schema.IndexLostError as error:
        if not fresh:
            counters.index_resets += 1
            _log.warning("cache_index_lost", reason=str(error))
    with storage_io():
        for name in (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-journal"):
            remove_tree(files.root / name)
        for directory in (files.namespaces, files.staging):
            for entry in directory.iterdir():
                # What stays is an orphan, which the sweep takes up.
                with contextlib.suppress(OSError):
                    remove_tree(entry)
    try:
        return schema.create(path, root_id)
    except DiskFullError:
        if not ballast.drop():
            raise
    return schema.create(path, root_id)


def sweep(index: Index, files: Files, account: Account, evictor: Evictor) -> None:
    """Bring rows, files and account together.

    Raises:
        DiskFullError: the volume is full, and not with our own.
        StorageError: the volume refused.
    """
    with storage_io():
        ((total,),) = index.all("SELECT coalesce(sum(alloc), 0) FROM file")
        account.change(blobs=total)
        namespaces = dict(index.all("SELECT id, n FROM ns"))
        # What needs no commit first: it may make the room for the commits.
        for entry in files.staging.iterdir():
            _discard(account, entry)
        for entry in files.namespaces.iterdir():
            if entry.name not in namespaces:
                _discard(account, entry)
        evictor.unlink_doomed()
        for namespace_id, ns in namespaces.items():
            files.make_directory(files.namespace(namespace_id))
            _sweep_namespace(index, account, evictor, ns, files.namespace(namespace_id))
        account.measured(overhead=files.overhead_bytes())
    evictor.shrink()
    evictor.ensure_reserve()


def _discard(account: Account, path: Path) -> None:
    """Remove what no row speaks of; what cannot go counts, until the next start."""
    try:
        remove_tree(path)
    except OSError as error:
        _log.warning("cache_orphan_kept", errno=error.errno)
        account.change(blobs=tree_allocated(path))


def _sweep_namespace(
    index: Index, account: Account, evictor: Evictor, ns: int, directory: Path
) -> None:
    rows = {
        row.digest.hex(): row
        for row in (
            _Row(*values)
            for values in index.all(
                "SELECT n, digest, size, alloc FROM file WHERE ns = ?", (ns,)
            )
        )
    }
    resized: list[tuple[int, int]] = []
    damaged: list[_Row] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            row = rows.get(entry.name)
            if row is None:
                _discard(account, Path(entry.path))
                continue
            found = entry.stat(follow_symlinks=False)
            if not entry.is_file(follow_symlinks=False) or found.st_size != row.size:
                damaged.append(row)
            # Of damaged ones too: not every one may go.
            if (alloc := tree_allocated(Path(entry.path))) != row.alloc:
                resized.append((alloc, row.n))
                account.change(blobs=alloc - row.alloc)
            del rows[entry.name]
    step = index.rows_per_removal
    for start in range(0, len(resized), step):
        some = resized[start : start + step]
        evictor.relieved(functools.partial(index.set_allocated, some))
    for lost, reason in (
        (rows.values(), RemovalReason.MISSING),
        (damaged, RemovalReason.DAMAGED),
    ):
        owners = {
            n
            for row in lost
            for (n,) in index.all("SELECT node FROM blob WHERE file = ?", (row.n,))
        }
        if owners:
            _log.warning("cache_swept", reason=reason.value, nodes=len(owners))
            evictor.remove(ns, sorted(owners), reason)
