"""Reading from a cache by names: paths, leases, blobs.

In: a node's or a blob's name. Out: records, holds, bytes; whether the root is there.
What a lookup by tokens finds is named so, and what an artifact lists.
"""

import contextlib
from typing import Final

from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.blob_stream import BlobStream
from kvport.snapshot.cache.expiry import first_current
from kvport.snapshot.cache.leases import LEASE_SECONDS, Lease
from kvport.snapshot.cache.lookup import Lookup
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.reader import Reader
from kvport.snapshot.cache.records import BlobRef, Namespace, NodeRecord, RemovalReason
from kvport.snapshot.cache.scrub import Scrub
from kvport.snapshot.errors import GoneError, StorageError


class Reading:
    """The part of a `Cache` that changes nothing, but removes what is damaged.

    Attributes:
        scrub: reads all that is stored, when it is told to.
    """

    def __init__(self, parts: Parts) -> None:
        self._root = parts.root
        self._index = parts.index
        self._counters = parts.counters
        self._evictor = parts.evictor
        self._lookup = Lookup(parts.index, parts.files, parts.evictor)
        self._reader = Reader(parts.index, parts.files, parts.evictor, parts.counters)
        self.scrub: Final = Scrub(parts.index, parts.files, self._reader, self._lookup)

    @property
    def root_id(self) -> str:
        """Name of the root, to be expected the next time."""
        return self._root.root_id

    def check(self) -> None:
        """See that the root is there: see `Claim.check`."""
        self._root.check()

    def verify(self) -> None:
        """See that it is the root it was, with its index: see `Claim.verify`."""
        self._root.verify()
        try:
            self._index.verify()
        except StorageError:
            # It is the root's loss if that went meanwhile.
            self._root.verify()
            raise

    def try_write(self) -> None:
        """See that it takes a byte: see `Claim.try_write`."""
        self._root.try_write()

    def note_restored(self, namespace: Namespace, tokens: int) -> None:
        """Count tokens that a request really starts with."""
        self._counters.add_restored(namespace.id, tokens)

    def path(self, ns: Namespace, tip: NodeId) -> tuple[NodeRecord, ...]:
        """The nodes from the root to `tip`, which is the last.

        Raises:
            GoneError: it was removed, or is now, since it is not what was stored.
        """
        return self._lookup.path(ns, tip)

    def ttl(self, ns: Namespace, node: NodeId) -> int | None:
        """A node's own seconds after its last use until it expires.

        None if it has none of its own.

        Raises:
            GoneError: it was removed.
        """
        return self._index.own_ttl(self._index.namespace_row(ns.id), node)

    def lease(
        self, ns: Namespace, tip: NodeId, owner: str, seconds: float = LEASE_SECONDS
    ) -> Lease:
        """Keep a node and all above it from eviction, until a fixed time.

        Raises:
            GoneError: it was removed, or has expired.
        """
        with self._index.lock:
            row = self._index.namespace_row(ns.id)
            n = self._index.find(row, tip)
            if n and first_current(self._index, [n]) is None:
                raise GoneError("the path has expired")
            return self._evictor.leases.acquire(row, tip, owner, seconds=seconds)

    def read(self, ns: Namespace, ref: BlobRef) -> bytearray:
        """A whole blob; size and digest are those of the bytes returned.

        Raises:
            DamagedError: they are not; the nodes that own the blob are gone now, with
                all below them.
            GoneError: it was removed by design.
            StorageError: no file could be opened.
        """
        return self._reader.read(ns, ref)

    def open_blob(self, ns: Namespace, ref: BlobRef) -> BlobStream:
        """A blob as a stream; the caller verifies, and calls `report_damage`.

        Raises:
            DamagedError: it has lost its file.
            GoneError: it was removed by design.
        """
        return self._reader.open(ns, ref)

    def report_damage(self, ns: Namespace, ref: BlobRef) -> None:
        """Remove the nodes that own a damaged blob, with all below them.

        Does nothing if the blob was removed in the meantime.
        """
        with contextlib.suppress(GoneError):
            self._reader.report(ns, ref, RemovalReason.DAMAGED)
