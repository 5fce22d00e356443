"""Receiving state in files: how imports bring what was computed elsewhere.

In: what an import is about to write, then staged blobs and records. Out: an allowance
of the hour's budget, room under the cap, a directory; in the end nodes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.account import Reservation
from kvport.snapshot.cache.admission import Admission
from kvport.snapshot.cache.budget import Allowance
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.reading import Reading
from kvport.snapshot.cache.records import Admitted, Namespace, NodeRecord
from kvport.snapshot.cache.uploads import Uploads


class Receiving(Reading):
    """The part of a `Cache` that takes what imports bring."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._policies = parts.policies
        self._uploads: Final = Uploads(parts.files, parts.evictor)
        self._admission: Final = Admission(parts)

    def allow(self, ns: Namespace, nbytes: int) -> Allowance:
        """Hold bytes of a namespace's hourly budget, before any of them is written.

        Args:
            ns: where they are for.
            nbytes: to be written, in whole blocks.

        Raises:
            WriteBudgetError: as many may not be written now.
        """
        allowance = Allowance(self._counters.budget, ns.id)
        allowance.cover(nbytes, self._policies[ns.id].write_bytes_per_hour)
        return allowance

    def note_uploaded(self, ns: Namespace, blob_class: BlobClass, nbytes: int) -> None:
        """Count bytes of a blob that were staged, whatever comes of them."""
        self._counters.add_uploaded(ns.id, blob_class, nbytes)

    def reserve(self, nbytes: int, *, files: int = 1) -> Reservation:
        """Hold room for staged files, evicting for it.

        Args:
            nbytes: size of all files together.
            files: how many there are; each may take a bit more than its size.

        Raises:
            CapacityError: the cap, or what is in use, leaves no room.
            StorageError: the index could not be written.
        """
        return self._uploads.reserve(nbytes, files)

    def staging(self, import_id: str) -> Path:
        """A directory for an upload, on the cache's volume; made on first use.

        Raises:
            ValueError: the id is no plain name.
            StorageError: the volume refused.
        """
        return self._uploads.make(import_id)

    def discard_staging(self, import_id: str) -> None:
        """Remove an upload's directory; to be done before its reservation ends."""
        self._uploads.discard(import_id)

    def admit(
        self,
        ns: Namespace,
        nodes: Sequence[NodeRecord],
        staged: Mapping[BlobDigest, Path],
        reservation: Reservation,
    ) -> Admitted:
        """Make verified state visible, all of it or nothing.

        Args:
            ns: where to.
            nodes: parents before children; the first one's parent is stored, or the
                root.
            staged: files with the blobs that are not stored yet, below `staging`.
                They are moved; others are left alone.
            reservation: holds the room of the staged files; what becomes of it is
                counted as blobs, the rest remains the caller's.

        Raises:
            ValueError: a node's id is not the name of its path.
            GoneError: a parent or a blob is neither stored nor staged.
            TierError: the namespace's tier is not `on`.
            CapacityError: no room for the rows, or under the namespace's quota.
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        row = self._index.namespace_row(ns.id)
        return self._admission.admit(ns, row, nodes, staged, reservation)
