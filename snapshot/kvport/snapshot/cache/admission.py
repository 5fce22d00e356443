"""Admission: staged blobs become nodes, in one commit or not at all.

In: records of a path whose blobs are verified and staged below the root. Out: how many
were new. Equal bytes under the same parent are one node: kinds and attestations merge.
"""

import contextlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.manifest.errors import RevokedKeyError
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import node_id
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.account import (
    BLOCK,
    NODE_BYTES,
    Reservation,
    allocation_bound,
    whole_blocks,
)
from kvport.snapshot.cache.directories import allocated, sync_directories
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.records import Admitted, BlobRef, Namespace, NodeRecord
from kvport.snapshot.cache.regular import set_trailer
from kvport.snapshot.errors import GoneError, TierError


@attrs.frozen
class _Move:
    ref: BlobRef
    staged: Path
    final: Path
    trailer: bytes


class Admission:
    """Admits into one cache; see the module."""

    def __init__(self, parts: Parts) -> None:
        self._index: Final = parts.index
        self._files: Final = parts.files
        self._account: Final = parts.account
        self._evictor: Final = parts.evictor
        self._policies: Final = parts.policies
        self._budget: Final = parts.counters.budget
        self._barred: Final = parts.barred

    def admit(
        self,
        namespace: Namespace,
        ns: int,
        nodes: Sequence[NodeRecord],
        staged: Mapping[BlobDigest, Path],
        reservation: Reservation,
    ) -> Admitted:
        """See `Cache.admit`."""
        _check(nodes)
        if not self._policies.stores(namespace.id):
            tier = self._policies[namespace.id].tier
            raise TierError(
                f"the namespace {namespace.id[:8]} ({namespace.scope}) takes no state:"
                f" its tier is {tier.value}"
            )
        with self._evictor.changes:
            # The blobs are on the volume already: only the rows may lack room.
            return self._evictor.with_room(
                len(nodes) * NODE_BYTES,
                lambda: self._admit(namespace, ns, nodes, staged, reservation),
                [ns],
            )

    def _admit(
        self,
        namespace: Namespace,
        ns: int,
        nodes: Sequence[NodeRecord],
        staged: Mapping[BlobDigest, Path],
        reservation: Reservation,
    ) -> Admitted:
        self._files.check_root()
        if any(self._barred.names(said) for n in nodes for said in n.attestations):
            raise RevokedKeyError("state came from a key that was revoked meanwhile")
        self._evictor.ensure_directory(namespace.id, ns)
        blobs = {
            ref.digest: (attrs.evolve(ref, trailer=len(trailer)), trailer)
            for node in nodes
            for ref, trailer in _trailed(node)
        }
        # Room for one part may evict another that was present: until it fits.
        while True:
            absent = self._absent(ns, blobs)
            refs = [ref for ref, _ in absent]
            nbytes = sum(whole_blocks(ref.size + ref.trailer) for ref in refs)
            if self._evictor.within_quota(ns, namespace.id, nbytes):
                continue
            missing = self._bound(ns, nodes, refs) - reservation.remaining
            if missing <= 0:
                break
            reservation.absorb(self._evictor.reserve(missing, [ns]))
        moves = [
            _Move(ref, _staged(staged, ref), self._final(namespace, ref), trailer)
            for ref, trailer in absent
        ]
        admitted = self._move(ns, nodes, moves, reservation)
        # The rest was counted when it was staged.
        rest = nbytes - sum(whole_blocks(ref.size) for ref in refs)
        self._budget.add(namespace.id, rest)
        return admitted

    def _final(self, namespace: Namespace, ref: BlobRef) -> Path:
        return self._files.blob(namespace.id, ref.digest)

    def _absent(
        self, ns: int, blobs: Mapping[BlobDigest, tuple[BlobRef, bytes]]
    ) -> list[tuple[BlobRef, bytes]]:
        return [
            found
            for digest, found in blobs.items()
            if self._index.file_size(ns, digest) is None
        ]

    def _bound(
        self, ns: int, nodes: Sequence[NodeRecord], absent: Sequence[BlobRef]
    ) -> int:
        """Bytes that may be needed; a node that is whole is changed at most."""
        rows = sum(
            BLOCK if self._index.is_whole(ns, node) else NODE_BYTES for node in nodes
        )
        return rows + sum(allocation_bound(ref.size + ref.trailer) for ref in absent)

    def _move(
        self,
        ns: int,
        nodes: Sequence[NodeRecord],
        moves: Sequence[_Move],
        reservation: Reservation,
    ) -> Admitted:
        done: list[tuple[_Move, int]] = []
        replaced = new = 0
        try:
            with storage_io():
                for move in moves:
                    self._set_trailer(move, move.trailer)
                    alloc = allocated(move.staged)
                    self._files.publish(move.staged, move.final)
                    done.append((move, alloc))
                sync_directories(
                    path.parent for m, _ in done for path in (m.staged, m.final)
                )
            # Rows and account together, for whoever reads both.
            with self._index.lock:
                with self._index.transaction():
                    for move, alloc in done:
                        replaced += self._index.add_file(ns, move.ref, alloc)
                    for node in nodes:
                        new += self._index.add_node(ns, node)
                self._account.change(blobs=-replaced)
                reservation.spend(sum(alloc for _, alloc in done))
        except BaseException:
            self._files.check_root()
            for move, _ in reversed(done):
                try:
                    self._files.publish(move.final, move.staged)
                except OSError:
                    self._files.remove(move.final)
            for move in moves:
                with contextlib.suppress(OSError):
                    self._set_trailer(move, b"")
            self._evictor.measure()
            raise
        self._evictor.measure()
        return Admitted(admitted_segments=new, present_segments=len(nodes) - new)

    def _set_trailer(self, move: _Move, trailer: bytes) -> None:
        set_trailer(self._files.root, move.staged, move.ref.size, trailer)


def _check(nodes: Sequence[NodeRecord]) -> None:
    for node in nodes:
        digests = {ref.blob_class: ref.digest for ref in node.blobs}
        if node.id != node_id(node.parent, node.key, digests):
            raise ValueError("a node's id is not the name of its path")
        if len(node.tokens) != (node.end - node.start) * TOKEN_SIZE:
            raise ValueError("a node must carry the tokens of its rows")


def _trailed(node: NodeRecord) -> Iterator[tuple[BlobRef, bytes]]:
    """A node's blobs, each with what is to follow it in its file."""
    for ref in node.blobs:
        yield ref, node.tokens if ref.blob_class is BlobClass.KV else b""


def _staged(staged: Mapping[BlobDigest, Path], ref: BlobRef) -> Path:
    path = staged.get(ref.digest)
    if path is None:
        raise GoneError("a blob is neither stored nor staged")
    with storage_io():
        found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != ref.size:
        raise GoneError("a staged blob is not the file it was")
    return path
