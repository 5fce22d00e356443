"""Admission: staged blobs become nodes, in one commit or not at all.

In: records of a path whose blobs are verified and staged below the root. Out: how many
were new. Equal bytes under the same parent are one node: kinds and attestations merge.
"""

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.manifest.nodes import node_id
from kvport.snapshot.cache.account import (
    BLOCK,
    NODE_BYTES,
    Account,
    Reservation,
    allocation_bound,
)
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import (
    Files,
    allocated,
    flush,
    publish,
    storage_io,
    sync_directories,
)
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import Admitted, BlobRef, Namespace, NodeRecord
from kvport.snapshot.errors import GoneError


@attrs.frozen
class _Move:
    ref: BlobRef
    staged: Path
    final: Path


class Admission:
    """Admits into one cache; see the module."""

    def __init__(
        self, index: Index, files: Files, account: Account, evictor: Evictor
    ) -> None:
        self._index: Final = index
        self._files: Final = files
        self._account: Final = account
        self._evictor: Final = evictor

    def admit(
        self,
        namespace: Namespace,
        ns: int,
        nodes: Sequence[NodeRecord],
        staged: Mapping[BlobDigest, Path],
        reservation: Reservation,
    ) -> Admitted:
        """See `Cache.admit`."""
        _check_names(nodes)
        with self._evictor.changes:
            # The blobs are on the volume already: only the rows may lack room.
            return self._evictor.with_room(
                len(nodes) * NODE_BYTES,
                lambda: self._admit(namespace, ns, nodes, staged, reservation),
            )

    def _admit(
        self,
        namespace: Namespace,
        ns: int,
        nodes: Sequence[NodeRecord],
        staged: Mapping[BlobDigest, Path],
        reservation: Reservation,
    ) -> Admitted:
        self._evictor.ensure_directory(namespace.id, ns)
        blobs = {ref.digest: ref for node in nodes for ref in node.blobs}
        # Room for one part may evict another that was present: until it fits.
        while True:
            absent = self._absent(ns, blobs)
            missing = self._bound(ns, nodes, absent) - reservation.remaining
            if missing <= 0:
                break
            reservation.absorb(self._evictor.reserve(missing))
        moves = [
            _Move(ref, _staged(staged, ref), self._final(namespace, ref))
            for ref in absent
        ]
        return self._move(ns, nodes, moves, reservation)

    def _final(self, namespace: Namespace, ref: BlobRef) -> Path:
        return self._files.blob(namespace.id, ref.digest)

    def _absent(self, ns: int, blobs: Mapping[BlobDigest, BlobRef]) -> list[BlobRef]:
        return [
            ref
            for digest, ref in blobs.items()
            if self._index.file_size(ns, digest) is None
        ]

    def _bound(
        self, ns: int, nodes: Sequence[NodeRecord], absent: Sequence[BlobRef]
    ) -> int:
        """Bytes that may be needed; a node that is whole is changed at most."""
        rows = sum(
            BLOCK if self._index.is_whole(ns, node) else NODE_BYTES for node in nodes
        )
        return rows + sum(allocation_bound(ref.size) for ref in absent)

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
                    flush(move.staged)
                    alloc = allocated(move.staged)
                    publish(move.staged, move.final)
                    done.append((move, alloc))
                sync_directories(
                    path.parent for m, _ in done for path in (m.staged, m.final)
                )
            with self._index.transaction():
                for move, alloc in done:
                    digest, size = move.ref.digest, move.ref.size
                    replaced += self._index.add_file(ns, digest, size, alloc)
                for node in nodes:
                    new += self._index.add_node(ns, node)
        except BaseException:
            with storage_io():
                for move, _ in reversed(done):
                    move.final.rename(move.staged)
            raise
        self._account.change(blobs=-replaced)
        reservation.spend(sum(alloc for _, alloc in done))
        self._account.measured(overhead=self._files.overhead_bytes())
        return Admitted(admitted_segments=new, present_segments=len(nodes) - new)


def _check_names(nodes: Sequence[NodeRecord]) -> None:
    for node in nodes:
        digests = {ref.blob_class: ref.digest for ref in node.blobs}
        if node.id != node_id(node.parent, node.key, digests):
            raise ValueError("a node's id is not the name of its path")


def _staged(staged: Mapping[BlobDigest, Path], ref: BlobRef) -> Path:
    path = staged.get(ref.digest)
    if path is None:
        raise GoneError("a blob is neither stored nor staged")
    with storage_io():
        found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != ref.size:
        raise GoneError("a staged blob is not the file it was")
    return path
