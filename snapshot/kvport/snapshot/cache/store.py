"""Storing a batch: durable before visible, all of it or nothing.

In: items of chains, in order. Out: nodes, and tips that move; where a chain ends, its
path is pruned by its retention. The steps: hash and name; reserve, evicting if need be;
write and flush files under temporary names; rename; flush directories; one commit. A
segment that does not fit breaks its own chain only; a volume that fails breaks all
chains of the batch, and nothing of the batch is left. One that is full of our own is
tried once more after the oldest leaves made room.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import structlog
from blake3 import blake3

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId, node_id
from kvport.snapshot.cache.account import (
    NODE_BYTES,
    Account,
    Reservation,
    allocation_bound,
)
from kvport.snapshot.cache.chain import Chain, Item
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import (
    Files,
    WrittenFile,
    publish,
    storage_io,
    sync_directories,
)
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.pruning import prunable
from kvport.snapshot.cache.records import BlobRef, Bytes, NewSegment, NodeRecord, nbytes
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.stats import Counters, SkipReason
from kvport.snapshot.errors import (
    CapacityError,
    DiskFullError,
    GoneError,
    StorageError,
)

_log = structlog.get_logger(__name__)

_REASONS: Final[Mapping[type[Exception], SkipReason]] = {
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
    reservation: Reservation
    written: list[tuple[BlobRef, WrittenFile]] = attrs.field(factory=list)


class Store:
    """Stores batches; see the module."""

    def __init__(
        self,
        index: Index,
        files: Files,
        account: Account,
        evictor: Evictor,
        counters: Counters,
    ) -> None:
        self._index = index
        self._files = files
        self._account = account
        self._evictor = evictor
        self._counters = counters

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
                item.chain.lease.release()
        ready = [
            self._prepare(item.chain, item.segment)
            for item in batch
            if item.segment is not None
            and not _skip_if_broken(item.chain, item.segment)
        ]
        try:
            with self._evictor.changes:
                nbytes = sum(map(self._missing, ready))
                self._evictor.with_room(nbytes, lambda: self._store(ready))
                self._evictor.renew_ballast()
        except (StorageError, DiskFullError) as error:
            reason = _REASONS[type(error)]
            _log.warning("cache_store_failed", reason=reason.value)
            for one in ready:
                one.chain.skip(reason, one.node.start)
        finally:
            for one in ready:
                one.reservation.release()
            for item in batch:
                if item.segment is None:
                    item.chain.lease.release()
        for item in batch:
            if item.segment is None and item.chain.retention is not None:
                self._retain(item.chain, item.chain.retention)

    def _retain(self, chain: Chain, retention: Retention) -> None:
        """Prune the path of a chain that has ended; it stays whole if that fails."""
        layout = chain.namespace.layout
        if layout.full_only:
            return
        plan = functools.partial(
            prunable,
            self._index,
            self._evictor.leases,
            ns=chain.ns,
            layout=layout,
            tip=chain.tip,
            retention=retention,
        )
        try:
            with self._evictor.changes:
                self._evictor.prune(plan)
                self._evictor.renew_ballast()
        except (StorageError, DiskFullError) as error:
            self._counters.add_failed_pruning()
            _log.warning("cache_pruning_failed", reason=error.code)

    def _prepare(self, chain: Chain, segment: NewSegment) -> _Ready:
        refs: list[BlobRef] = []
        buffers: dict[BlobDigest, Sequence[Bytes]] = {}
        for blob_class in BlobClass:
            if (parts := segment.blobs.get(blob_class)) is None:
                continue
            digest = _digest(parts)
            refs.append(BlobRef(blob_class, digest, sum(map(nbytes, parts))))
            buffers[digest] = parts
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
        return _Ready(chain, node, buffers, Reservation(self._account, 0))

    def _store(self, ready: list[_Ready]) -> None:
        for namespace, ns in {r.chain.namespace.id: r.chain.ns for r in ready}.items():
            self._evictor.ensure_directory(namespace, ns)
        # What is left out here is skipped; `ready` keeps what may have to be undone.
        ready[:] = self._reserve(ready)
        try:
            with storage_io():
                self._write(ready)
            with self._index.transaction():
                replaced = sum(map(self._add_files, ready))
                new = [
                    one.node
                    for one in ready
                    if self._index.add_node(one.chain.ns, one.node)
                ]
        except BaseException:
            self._undo(ready)
            raise
        self._account.change(blobs=-replaced)
        for one in ready:
            for ref, file in one.written:
                one.reservation.spend(file.alloc)
                self._counters.add_written(ref.blob_class, ref.size)
        self._counters.add_captured(sum(node.end - node.start for node in new))
        for chain, tip in {one.chain: one.node.id for one in ready}.items():
            chain.lease.move(tip)
            chain.tip = tip
        with storage_io():
            self._account.measured(overhead=self._files.overhead_bytes())

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
            for one in ready:
                chain = one.chain
                if (reason := lost.get(chain)) is None:
                    try:
                        if (chain.ns, one.node.parent) not in known:
                            self._check_parent(chain.ns, one.node.parent)
                        if (missing := self._missing(one)) > 0:
                            settled = False
                            one.reservation.absorb(self._evictor.reserve(missing))
                    except (CapacityError, GoneError) as error:
                        reason = lost[chain] = _REASONS[type(error)]
                if reason is None:
                    kept.append(one)
                    known.add((chain.ns, one.node.id))
                else:
                    one.reservation.release()
                    chain.skip(reason, one.node.start)
            ready = kept
        return list(ready)

    def _check_parent(self, ns: int, parent: NodeId) -> None:
        if self._index.find(ns, parent) is None:
            raise GoneError("the segment before was removed")

    def _missing(self, one: _Ready) -> int:
        """Bytes to reserve beyond what is held."""
        files = sum(
            allocation_bound(ref.size)
            for ref in one.node.blobs
            if self._index.file_size(one.chain.ns, ref.digest) is None
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
                one.written.append((ref, file))
                done.add((ns, ref.digest))
        files = [file for one in ready for _, file in one.written]
        for file in files:
            publish(file.temporary, file.final)
        sync_directories(file.final.parent for file in files)

    def _add_files(self, one: _Ready) -> int:
        """Make rows; returns the bytes of doomed files that were written over."""
        return sum(
            self._index.add_file(one.chain.ns, ref.digest, ref.size, file.alloc)
            for ref, file in one.written
        )

    def _undo(self, ready: Sequence[_Ready]) -> None:
        for _, file in (written for one in ready for written in one.written):
            try:
                try:
                    file.temporary.unlink()
                except FileNotFoundError:  # renamed already
                    file.final.unlink(missing_ok=True)
            except OSError:
                # It stays until the next sweep, and so on the account.
                self._account.change(blobs=file.alloc)
        for one in ready:
            one.written.clear()


def _skip_if_broken(chain: Chain, segment: NewSegment) -> bool:
    if chain.broken is None:
        return False
    chain.skip(SkipReason(chain.broken), segment.start)
    return True


def _digest(parts: Sequence[Bytes]) -> BlobDigest:
    hasher = blake3()
    for part in parts:
        hasher.update(memoryview(part).cast("B"))
    return BlobDigest(hasher.digest())
