"""What the cache tells about itself: counters, and a snapshot of all numbers."""

import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import attrs

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.account import AccountNumbers
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import RemovalReason


class SkipReason(StrEnum):
    """Why a segment was not stored."""

    CAPACITY = "capacity"
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    GONE = "gone"
    CLOSED = "closed"
    INTERNAL = "internal"


@attrs.frozen
class NamespaceStats:
    """One namespace: `nbytes` is by blob class, each file once per class."""

    id: str
    scope: str
    block_size: int
    nodes: int
    tokens: int
    files: int
    nbytes: Mapping[BlobClass, int]


@attrs.frozen
class CacheStats:
    """All numbers, in bytes where they are not counts."""

    account: AccountNumbers
    namespaces: tuple[NamespaceStats, ...]
    leases: int
    removed: Mapping[RemovalReason, int]
    damaged: int
    written: Mapping[BlobClass, int]
    skipped: Mapping[SkipReason, int]
    index_resets: int


def namespace_stats(index: Index) -> tuple[NamespaceStats, ...]:
    """Numbers of all namespaces."""
    with index.lock:
        found = []
        for ns, name, scope, block_size in index.all(
            "SELECT n, id, scope, block_size FROM ns ORDER BY id"
        ):
            ((nodes, tokens),) = index.all(
                'SELECT count(*), coalesce(sum("end" - start), 0) FROM node'
                " WHERE ns = ?",
                (ns,),
            )
            ((files,),) = index.all("SELECT count(*) FROM file WHERE ns = ?", (ns,))
            sizes = index.all(
                "SELECT class, sum(size) FROM (SELECT DISTINCT class, file.n, size"
                " FROM file JOIN blob ON blob.file = file.n WHERE ns = ?)"
                " GROUP BY class",
                (ns,),
            )
            found.append(
                NamespaceStats(
                    id=name,
                    scope=scope,
                    block_size=block_size,
                    nodes=nodes,
                    tokens=tokens,
                    files=files,
                    nbytes={BlobClass(name): size for name, size in sizes},
                )
            )
        return tuple(found)


class Counters:
    """Since start; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.removed: Counter[RemovalReason] = Counter()
        self.written: Counter[BlobClass] = Counter()
        self.skipped: Counter[SkipReason] = Counter()
        self.damaged = 0
        self.index_resets = 0

    def add_removed(self, reason: RemovalReason, count: int) -> None:
        """Nodes that went."""
        with self._lock:
            self.removed[reason] += count

    def add_written(self, blob_class: BlobClass, nbytes: int) -> None:
        """Bytes of blobs that were really written."""
        with self._lock:
            self.written[blob_class] += nbytes

    def add_skipped(self, reason: SkipReason) -> None:
        """A segment that was not stored."""
        with self._lock:
            self.skipped[reason] += 1

    def add_damaged(self) -> None:
        """A blob that was found damaged or without its file."""
        with self._lock:
            self.damaged += 1
