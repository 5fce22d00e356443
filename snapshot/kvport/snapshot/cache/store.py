"""Storing a batch: durable before visible, all of it or nothing.

In: items of chains, in order. Out: nodes, and tips that move; where a chain ends, its
path is pinned if so wished, and pruned by its retention. The steps: hash and name;
reserve, evicting if need be; write and flush files under temporary names; rename; flush
directories; one commit. A segment that does not fit breaks its own chain only; a volume
that fails breaks all chains of the batch, and nothing of the batch is left. One that is
full of our own is tried once more after the oldest leaves made room.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import structlog
from blake3 import blake3

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId, node_id
from kvport.snapshot.cache.account import (
    NODE_BYTES,
    Reservation,
    allocation_bound,
    whole_blocks,
)
from kvport.snapshot.cache.budget import Allowance
from kvport.snapshot.cache.chain import Chain, Item
from kvport.snapshot.cache.directories import sync_directories
from kvport.snapshot.cache.endings import Endings
from kvport.snapshot.cache.files import WrittenFile, storage_io
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.records import (
    BlobRef,
    Bytes,
    NewSegment,
    NodeRecord,
    nbytes,
)
from kvport.snapshot.cache.refused import Refused
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.errors import (
    CacheAbsentError,
    CapacityError,
    DiskFullError,
    GoneError,
    QuotaError,
    StorageError,
    WriteBudgetError,
)

_log = structlog.get_logger(__name__)


class _BarredError(Exception):
    """A segment came from a key that was revoked."""


_REASONS: Final[Mapping[type[Exception], SkipReason]] = {
    CacheAbsentError: SkipReason.ABSENT,
    WriteBudgetError: SkipReason.WRITE_BUDGET,
    _BarredError: SkipReason.REVOKED,
    QuotaError: SkipReason.QUOTA,
    CapacityError: SkipReason.CAPACITY,
    DiskFullError: SkipReason.DISK_FULL,
    GoneError: SkipReason.GONE,
    StorageError: SkipReason.STORAGE,
}


@attrs.frozen(eq=False)
class _Ready:
    """A segment that is hashed and named, on its way to the disk."""

    chain: Chain
    node: NodeRecord
    buffers: Mapping[BlobDigest, Sequence[Bytes]]
    used: int
    """When the chain was last used: its life begins there, whenever it is stored."""
    reservation: Reservation
    allowance: Allowance
    written: list[tuple[BlobRef, WrittenFile]] = attrs.field(factory=list)


class Store:
    """Stores batches; see the module.

    Attributes:
        refused: what found no room last.
    """

    def __init__(self, parts: Parts, on_failed: Callable[[], None]) -> None:
        self.refused: Final = Refused(parts)
        self._on_failed: Final = on_failed
        self._index: Final = parts.index
        self._files: Final = parts.files
        self._account: Final = parts.account
        self._evictor: Final = parts.evictor
        self._counters: Final = parts.counters
        self._policies: Final = parts.policies
        self._budget: Final = parts.counters.budget
        self._room: Final = parts.room
        self._barred: Final = parts.barred
        self._endings: Final = Endings(parts)

    def store(self, batch: Sequence[Item]) -> None:
        """Store what can be stored; the chains say what could not."""
        storing = {
            item.chain
            for item in batch
            if item.segment is not None and item.chain.broken is None
        }
        for item in batch:
            # What ended before may make room for what is stored now.
            if item.segment is None and item.chain not in storing:
                self._close(item)
        ready = [
            self._prepare(item.chain, item.segment)
            for item in batch
            if item.segment is not None and not _skip(item.chain, item.segment)
        ]
        try:
            # A use alone is only noted, and written with what comes next.
            if ready:
                self._store_in_turn(ready)
        except (StorageError, DiskFullError) as error:
            self._failed(error, ready)
        finally:
            self._evictor.measure()
            for one in ready:
                one.reservation.release()
                one.allowance.release()
            for item in batch:
                if item.segment is None and item.chain in storing:
                    self._close(item)
        for item in batch:
            retention = item.chain.retention
            if item.segment is None and item.ends and retention is not None:
                self._endings.retain(item.chain, retention)

    def _store_in_turn(self, ready: list[_Ready]) -> None:
        with self._evictor.changes:
            nbytes = sum(map(self._missing, ready))
            self._evictor.with_room(
                nbytes,
                lambda: self._store(ready),
                {one.chain.ns for one in ready},
            )
            self._evictor.renew_ballast()

    def _close(self, item: Item) -> None:
        """What a chain brings after its segments: a use, or its end."""
        if item.ends:
            self._endings.end(item.chain)
        else:
            item.chain.renew()

    def _failed(self, error: StorageError | DiskFullError, ready: list[_Ready]) -> None:
        reason = self._reason(error)
        if ready:
            _log.warning("cache_store_failed", reason=reason.value, segments=len(ready))
        for one in ready:
            if reason is SkipReason.ABSENT:
                one.chain.lose(reason)
            else:
                one.chain.skip(reason, one.node.start)
        if reason is SkipReason.DISK_FULL:
            self.refused.by_volume(sum(one.reservation.remaining for one in ready))
        else:
            self._on_failed()

    def _reason(self, error: StorageError | DiskFullError) -> SkipReason:
        try:
            if isinstance(error, StorageError):
                self._files.check_root()
        except StorageError as found:
            error = found
        return _REASONS[type(error)]

    def _prepare(self, chain: Chain, segment: NewSegment) -> _Ready:
        refs: list[BlobRef] = []
        buffers: dict[BlobDigest, Sequence[Bytes]] = {}
        for blob_class in BlobClass:
            if (parts := segment.blobs.get(blob_class)) is None:
                continue
            digest = _digest(parts)
            trailer = segment.tokens if blob_class is BlobClass.KV else b""
            size = sum(map(nbytes, parts))
            refs.append(BlobRef(blob_class, digest, size, len(trailer)))
            # Classes may have equal bytes: the first one's file is written.
            buffers.setdefault(digest, [*parts, trailer])
        name = node_id(
            chain.head, segment.key, {ref.blob_class: ref.digest for ref in refs}
        )
        node = NodeRecord(
            id=name,
            parent=chain.head,
            start=segment.start,
            end=segment.end,
            key=segment.key,
            tokens=segment.tokens,
            blobs=tuple(refs),
            kinds=segment.kinds,
            attestations=(segment.provenance,),
        )
        chain.head = name
        return _Ready(
            chain,
            node,
            buffers,
            chain.used,
            Reservation(self._account, 0),
            Allowance(self._budget, chain.namespace.id),
        )

    def _store(self, ready: list[_Ready]) -> None:
        self._files.check_root()
        for namespace, ns in {r.chain.namespace.id: r.chain.ns for r in ready}.items():
            self._evictor.ensure_directory(namespace, ns)
        # What is left out here is skipped; `ready` keeps what may have to be undone.
        ready[:] = self._reserve(ready)
        try:
            with storage_io():
                self._write(ready)
            # Rows, account and counters together, for whoever reads them all.
            with self._index.lock:
                self._commit(ready)
        except BaseException:
            self._undo(ready)
            raise
        for chain, tip in {one.chain: one.node.id for one in ready}.items():
            chain.advance(tip)
        if ready:
            self.refused.clear()

    def _commit(self, ready: Sequence[_Ready]) -> None:
        with self._index.transaction():
            replaced = sum(map(self._add_files, ready))
            new = [
                one
                for one in ready
                if self._index.add_node(one.chain.ns, one.node, one.chain.ttl, one.used)
            ]
        self._account.change(blobs=-replaced)
        for one in ready:
            for ref, file in one.written:
                one.reservation.spend(file.alloc)
                self._counters.add_written(
                    one.chain.namespace.id, ref.blob_class, ref.size
                )
        for one in new:
            tokens = one.node.end - one.node.start
            self._counters.add_captured(one.chain.namespace.id, tokens)

    def _reserve(self, ready: Sequence[_Ready]) -> list[_Ready]:
        """Hold room for each segment; what finds none, or no parent, is skipped.

        Room for one may evict a blob that another shares: again until nothing changes.
        """
        settled = False
        while not settled:
            settled = True
            kept: list[_Ready] = []
            known: set[tuple[int, NodeId]] = set()
            lost: dict[Chain, SkipReason] = {}
            new: Counter[int] = Counter()
            for one in ready:
                chain = one.chain
                if (reason := lost.get(chain)) is None:
                    try:
                        if (chain.ns, one.node.parent) not in known:
                            self._check_parent(chain.ns, one.node.parent)
                        settled &= not self._admit(one, new)
                    except (
                        CapacityError,
                        GoneError,
                        WriteBudgetError,
                        _BarredError,
                    ) as error:
                        reason = lost[chain] = _REASONS[type(error)]
                        if reason is SkipReason.CAPACITY:
                            self.refused.by_limits(self._missing(one), chain.ns)
                if reason is None:
                    kept.append(one)
                    known.add((chain.ns, one.node.id))
                else:
                    one.reservation.release()
                    one.allowance.release()
                    chain.skip(reason, one.node.start)
            ready = kept
        return list(ready)

    def _admit(self, one: _Ready, new: Counter[int]) -> bool:
        """Hold what a segment needs; whether anything changed for that.

        Args:
            one: the segment.
            new: bytes of files by namespace that segments before it need.
        """
        chain, ns = one.chain, one.chain.ns
        if any(map(self._barred.names, one.node.attestations)):
            raise _BarredError
        absent = self._absent(one)
        nbytes = sum(whole_blocks(ref.size + ref.trailer) for ref in absent)
        limit = self._policies[chain.namespace.id].write_bytes_per_hour
        one.allowance.cover(nbytes, limit)
        changed = bool(nbytes) and self._evictor.within_quota(
            ns, chain.namespace.id, new[ns] + nbytes
        )
        if (missing := self._missing(one)) > 0:
            one.reservation.absorb(self._evictor.reserve(missing, [ns]))
            changed = True
        new[ns] += nbytes
        return changed

    def _check_parent(self, ns: int, parent: NodeId) -> None:
        if self._index.find(ns, parent) is None:
            raise GoneError("the segment before was removed")

    def _absent(self, one: _Ready) -> list[BlobRef]:
        ns = one.chain.ns
        return [
            ref
            for ref in one.node.blobs
            if self._index.file_size(ns, ref.digest) is None
        ]

    def _missing(self, one: _Ready) -> int:
        """Bytes to reserve beyond what is held."""
        files = sum(
            allocation_bound(ref.size + ref.trailer) for ref in self._absent(one)
        )
        return NODE_BYTES + files - one.reservation.remaining

    def _write(self, ready: Sequence[_Ready]) -> None:
        done: set[tuple[int, BlobDigest]] = set()
        for one in ready:
            ns, namespace = one.chain.ns, one.chain.namespace.id
            for ref in one.node.blobs:
                if (ns, ref.digest) in done:
                    continue
                if self._index.file_size(ns, ref.digest) is not None:
                    continue
                buffers = one.buffers[ref.digest]
                file = self._files.write(namespace, ref.digest, buffers)
                # Also if the batch is undone: the drive has worn.
                one.allowance.spend(file.alloc)
                one.written.append((ref, file))
                done.add((ns, ref.digest))
        files = [file for one in ready for _, file in one.written]
        for file in files:
            self._files.publish(file.temporary, file.final)
        sync_directories(file.final.parent for file in files)

    def _add_files(self, one: _Ready) -> int:
        """Make rows; returns the bytes of doomed files that were written over."""
        return sum(
            self._index.add_file(one.chain.ns, ref, file.alloc)
            for ref, file in one.written
        )

    def _undo(self, ready: Sequence[_Ready]) -> None:
        with contextlib.suppress(StorageError):
            self._unlink(ready)
        for one in ready:
            one.written.clear()

    def _unlink(self, ready: Sequence[_Ready]) -> None:
        self._files.check_root()
        for _, file in (written for one in ready for written in one.written):
            if file.temporary.exists():
                self._files.remove(file.temporary)
            else:  # renamed already
                self._files.remove(file.final)


def _skip(chain: Chain, segment: NewSegment) -> bool:
    """Whether a segment is not stored: its chain is broken, or it came too late."""
    if chain.broken is not None:
        chain.skip(SkipReason(chain.broken), segment.start)
    elif chain.closed and chain.is_over:
        chain.lose(SkipReason.EXPIRED)
    return chain.broken is not None


def _digest(parts: Sequence[Bytes]) -> BlobDigest:
    hasher = blake3()
    for part in parts:
        hasher.update(memoryview(part).cast("B"))
    return BlobDigest(hasher.digest())
