"""Reading blobs, with the digest checked on the very bytes that are returned.

In: a reference to a blob. Out: its bytes, or an error. A blob that is not what was
stored is removed with the nodes that own it and all below them: damage is a counted
miss, not a state to live with.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import structlog
from blake3 import blake3

from kvport.snapshot.cache.blob_stream import BlobStream, UnfitFileError
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import BlobRef, Namespace, RemovalReason
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import DamagedError, DiskFullError, GoneError, StorageError

_PARALLEL: Final = 1 << 20
"""Bytes from which a blob is hashed by several threads."""

_log = structlog.get_logger(__name__)


class Reader:
    """Reads without any lock; see `Cache.read`, `open_blob` and `report_damage`."""

    def __init__(
        self, index: Index, files: Files, evictor: Evictor, counters: Counters
    ) -> None:
        self._index = index
        self._files = files
        self._evictor = evictor
        self._counters = counters

    def read(self, ns: Namespace, ref: BlobRef) -> bytearray:
        """The whole blob, checked."""
        with self._damage(ns, ref):
            data = self._files.read(ns.id, ref)
        threads = blake3.AUTO if ref.size >= _PARALLEL else 1
        if blake3(data, max_threads=threads).digest() != ref.digest:
            self.report(ns, ref, RemovalReason.DAMAGED)
            raise DamagedError("a stored blob does not have its digest")
        return data

    def open(self, ns: Namespace, ref: BlobRef) -> BlobStream:
        """The blob as a stream, unchecked."""
        with self._damage(ns, ref):
            return self._files.open(ns.id, ref)

    def report(self, ns: Namespace, ref: BlobRef, reason: RemovalReason) -> None:
        """Remove what owns the blob.

        Raises:
            GoneError: the blob was removed by design, before or while it was read.
            CacheAbsentError: the root is not there.
            StorageError: the removal could not be stored.
        """
        row = self._index.namespace_row(ns.id)
        with self._evictor.changes:
            # A volume that is gone says nothing of the blob.
            self._files.check_root()
            if (sizes := self._index.file_sizes(row, ref.digest)) is None:
                raise GoneError("the blob was removed")
            if sizes != (ref.size, ref.trailer):
                raise GoneError("the blob was removed, and stored again")
            path = self._files.blob(ns.id, ref.digest)
            if reason is RemovalReason.MISSING and os.path.lexists(path):
                raise GoneError("the blob was removed, and stored again")
            self._counters.add_damaged(ns.id)
            owners = self._index.owners(row, ref.digest)
            # Which rows a path lost: from there on it is computed again.
            _log.warning(
                "cache_blob_lost",
                reason=reason.value,
                blob=ref.blob_class.value,
                size=ref.size,
                rows=self._index.rows(owners),
            )
            try:
                self._evictor.remove(row, owners, reason)
            except DiskFullError as error:
                raise StorageError("a removal could not be stored") from error

    @contextlib.contextmanager
    def _damage(self, ns: Namespace, ref: BlobRef) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            self.report(ns, ref, RemovalReason.MISSING)
            raise DamagedError("a stored blob has lost its file") from error
        except OSError as error:
            # Too many open files, no permission, a volume that is going: not the blob.
            raise StorageError("a blob's file could not be opened") from error
        except UnfitFileError as error:
            self.report(ns, ref, RemovalReason.DAMAGED)
            raise DamagedError("a stored blob is not what was stored") from error
