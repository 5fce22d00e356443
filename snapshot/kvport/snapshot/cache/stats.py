"""What the cache tells about itself: counters, and a snapshot of all numbers."""

import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import attrs

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.account import Account, AccountNumbers
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.leases import Leases
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
class Pruned:
    """Blobs of one class that retention took from nodes that stay."""

    blobs: int
    nbytes: int


@attrs.frozen
class CacheStats:
    """All numbers, in bytes where they are not counts.

    Attributes:
        account: what is held below the root.
        namespaces: by id.
        leases: nodes that are leased.
        removed: nodes, since start.
        pruned: blobs of nodes that stay, since start.
        failed_prunings: paths that could not be pruned when they ended.
        damaged: blobs.
        written: bytes of blobs that chains brought, since start.
        captured_tokens: rows of segments that chains brought and that were new.
        written_per_token: bytes written per captured token; empty before the first.
        skipped: segments that were not stored.
        index_resets: times that the index was lost, and the cache emptied.
    """

    account: AccountNumbers
    namespaces: tuple[NamespaceStats, ...]
    leases: int
    removed: Mapping[RemovalReason, int]
    pruned: Mapping[BlobClass, Pruned]
    failed_prunings: int
    damaged: int
    written: Mapping[BlobClass, int]
    captured_tokens: int
    written_per_token: Mapping[BlobClass, float]
    skipped: Mapping[SkipReason, int]
    index_resets: int


def cache_stats(
    index: Index, account: Account, leases: Leases, counters: "Counters"
) -> CacheStats:
    """All numbers, as of now."""
    with index.lock:
        tokens = counters.captured_tokens
        return CacheStats(
            account=account.numbers,
            namespaces=_namespace_stats(index),
            leases=len(leases),
            removed=dict(counters.removed),
            pruned={
                blob_class: Pruned(count, counters.pruned_bytes[blob_class])
                for blob_class, count in counters.pruned_blobs.items()
            },
            failed_prunings=counters.failed_prunings,
            damaged=counters.damaged,
            written=dict(counters.written),
            captured_tokens=tokens,
            written_per_token={
                blob_class: nbytes / tokens
                for blob_class, nbytes in counters.written.items()
                if tokens
            },
            skipped=dict(counters.skipped),
            index_resets=counters.index_resets,
        )


def _namespace_stats(index: Index) -> tuple[NamespaceStats, ...]:
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
        self.pruned_blobs: Counter[BlobClass] = Counter()
        self.pruned_bytes: Counter[BlobClass] = Counter()
        self.failed_prunings = 0
        self.captured_tokens = 0
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

    def add_captured(self, tokens: int) -> None:
        """Tokens of segments that were new."""
        with self._lock:
            self.captured_tokens += tokens

    def add_pruned(self, blob_class: BlobClass, nbytes: int) -> None:
        """A blob that a node lost, and stays without."""
        with self._lock:
            self.pruned_blobs[blob_class] += 1
            self.pruned_bytes[blob_class] += nbytes

    def add_failed_pruning(self) -> None:
        """A path that could not be pruned."""
        with self._lock:
            self.failed_prunings += 1

    def add_skipped(self, reason: SkipReason) -> None:
        """A segment that was not stored."""
        with self._lock:
            self.skipped[reason] += 1

    def add_damaged(self) -> None:
        """A blob that was found damaged or without its file."""
        with self._lock:
            self.damaged += 1
