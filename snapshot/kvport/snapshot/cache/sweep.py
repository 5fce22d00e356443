"""Start: make rows and files agree again after whatever ended the last process.

In: an open index, or a lost one. Out: every row has its file, every file its row, the
account equals what the disk holds. What does not agree goes, counted, and logged
before anything is removed.
"""

import functools
import itertools
import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import attrs
import structlog

from kvport.snapshot.cache import schema
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.companions import remove_all
from kvport.snapshot.cache.directories import names_in, tree_allocated
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files, storage_io
from kvport.snapshot.cache.foreign import announce, foreign_in, is_removable
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.inventory import Inventory
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.planted import misplaced, remove_planted
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import DiskFullError

INDEX_NAME: Final = "index.sqlite"
_SOME: Final = 8192
"""Rows named in one statement."""
_EXTENT: Final = """
WITH gone(n) AS (SELECT value FROM json_each(?))
SELECT count(*), coalesce(sum(alloc), 0) FROM file
WHERE n IN (SELECT file FROM blob WHERE node IN gone)
AND NOT EXISTS (SELECT 1 FROM blob WHERE file = file.n AND node NOT IN gone)"""
"""Files that go with these nodes, and their bytes."""

_Item = TypeVar("_Item")

_log = structlog.get_logger(__name__)


def open_index(
    files: Files,
    root_id: str,
    ballast: Ballast,
    counters: Counters,
    *,
    fresh: bool,
    mac: RowMac,
) -> sqlite3.Connection:
    """Open the index; one that is lost empties the cache.

    Raises:
        ForeignRootError: it was made with another home's key; it is left alone.
        StorageError: the volume refused.
    """
    path = files.root / INDEX_NAME
    try:
        try:
            return _connect(path, root_id, mac, counters)
        except DiskFullError:
            # Opening may have to write, as after a crash; the sweep makes more room.
            if not ballast.drop():
                raise
        return _connect(path, root_id, mac, counters)
    except schema.IndexLostError as error:
        files.check_root()
        if not fresh:
            counters.index_resets += 1
            with storage_io():
                held = sum(map(tree_allocated, (files.namespaces, files.staging)))
            _log.warning("cache_index_lost", reason=str(error), nbytes=held)
    with storage_io():
        remove_all(path)
        for directory in (files.namespaces, files.staging):
            for name in names_in(files.root, directory):
                # What stays is an orphan, which the sweep takes up.
                files.remove(directory / name)
    try:
        return schema.create(path, root_id, mac.root())
    except DiskFullError:
        if not ballast.drop():
            raise
    return schema.create(path, root_id, mac.root())


def _connect(
    path: Path, root_id: str, mac: RowMac, counters: Counters
) -> sqlite3.Connection:
    connection = schema.connect(path, root_id, mac.root())
    try:
        with schema.corruption():
            remove_planted(connection, mac, counters)
    except BaseException:
        connection.close()
        raise
    return connection


def sweep(index: Index, files: Files, account: Account, evictor: Evictor) -> int:
    """Bring rows, files and account together; what is to go is logged before it goes.

    Then nothing has been evicted yet. Answers the allocated bytes of files that went
    since no row spoke of them, or since they were doomed.

    Raises:
        DiskFullError: the volume is full, and not with our own.
        StorageError: the volume refused.
    """
    with storage_io():
        plan = _plan(index, files, account)
        _measure(index, files, account)
        # Nothing is missing on a volume that went while it was looked at.
        files.check_root()
        _announce(plan, index)
        # What needs no commit first: it may make the room for the commits.
        freed = 0
        for path in itertools.chain.from_iterable(plan.strays.values()):
            nbytes = tree_allocated(path)
            freed += nbytes if files.remove(path) else 0
        before = account.numbers.blobs
        evictor.unlink_doomed()
        freed += before - account.numbers.blobs
        for directory in plan.directories:
            files.make_directory(directory)
        account.change(blobs=plan.growth)
        for some in _batches(plan.resized, index.rows_per_removal):
            evictor.relieved(functools.partial(index.set_allocated, some))
        for loss in plan.losses:
            evictor.remove(loss.ns, loss.owners, loss.reason)
        for ns, nodes in misplaced(index).items():
            evictor.remove(ns, nodes, RemovalReason.TAMPERED)
        _measure(index, files, account)
        return freed


def _measure(index: Index, files: Files, account: Account) -> None:
    """Bring directories, and what is left of what is not ours, on the account."""
    namespaces = frozenset(name for (name,) in index.all("SELECT id FROM ns"))
    foreign = foreign_in(files.root, namespaces, frozenset())
    account.measured(overhead=files.overhead_bytes(foreign))


@attrs.frozen
class _Loss:
    """Nodes of one namespace whose files are not what was stored."""

    ns: int
    reason: RemovalReason
    owners: list[int]


@attrs.frozen
class _Plan:
    """All that does not agree, found before anything is changed.

    Attributes:
        directories: those of namespaces.
        strays: what no row speaks of, by why it is there.
        resized: allocated bytes, as found, and rows of files.
        growth: bytes that these have more than their rows say.
        losses: missing before damaged.
    """

    directories: list[Path]
    strays: dict[str, list[Path]]
    resized: list[tuple[int, int]]
    growth: int
    losses: list[_Loss]


def _plan(index: Index, files: Files, account: Account) -> _Plan:
    namespaces = dict(index.all("SELECT id, n FROM ns"))
    inventory = Inventory(index)
    account.change(blobs=inventory.allocated)
    foreign = [
        path
        for path in foreign_in(files.root, namespaces, frozenset())
        if is_removable(files.root, path)
    ]
    plan = _Plan(
        directories=[files.namespace(name) for name in namespaces],
        strays={
            "upload": [path for path in foreign if path.parent == files.staging],
            "namespace": [path for path in foreign if path.parent == files.namespaces],
            "foreign": [path for path in foreign if path.parent == files.root],
            "orphan": [],
        },
        resized=[],
        growth=0,
        losses=[],
    )
    growth = 0
    for name, ns in namespaces.items():
        directory = files.namespace(name)
        found = inventory.compare(ns, directory)
        plan.strays["orphan"].extend(directory / orphan for orphan in found.orphans)
        plan.resized.extend(found.resized)
        growth += found.growth
        for rows, reason in (
            (found.missing, RemovalReason.MISSING),
            (found.damaged, RemovalReason.DAMAGED),
        ):
            if owners := _owners(index, rows):
                plan.losses.append(_Loss(ns, reason, owners))
    return attrs.evolve(plan, growth=growth)


def _owners(index: Index, rows: Sequence[int]) -> list[int]:
    """Nodes that have one of these files."""
    found: set[int] = set()
    for some in _batches(rows, _SOME):
        sql = "SELECT node FROM blob WHERE file IN (SELECT value FROM json_each(?))"
        found.update(n for (n,) in index.all(sql, (json.dumps(some),)))
    return sorted(found)


def _announce(plan: _Plan, index: Index) -> None:
    """Say what will go and why, in nodes, files and bytes."""
    announce(plan.strays["foreign"])
    for reason, paths in plan.strays.items():
        _planned(reason, files=len(paths), nbytes=sum(map(tree_allocated, paths)))
    doomed = index.doomed()
    _planned("unfinished", files=len(doomed), nbytes=sum(file.alloc for file in doomed))
    counted: set[int] = set()
    for reason in (RemovalReason.MISSING, RemovalReason.DAMAGED):
        below = (
            index.subtree(loss.ns, loss.owners)
            for loss in plan.losses
            if loss.reason is reason
        )
        nodes = set(itertools.chain.from_iterable(below)) - counted
        counted |= nodes
        ((files, nbytes),) = index.all(_EXTENT, (json.dumps(list(nodes)),))
        _planned(reason, nodes=len(nodes), files=files, nbytes=nbytes)


def _planned(reason: str, *, nodes: int = 0, files: int = 0, nbytes: int = 0) -> None:
    if nodes or files or nbytes:
        _log.warning(
            "cache_removal_planned",
            reason=str(reason),
            nodes=nodes,
            files=files,
            nbytes=nbytes,
        )


def _batches(items: Sequence[_Item], count: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), count):
        yield items[start : start + count]
