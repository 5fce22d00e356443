"""Staging: where an import's blobs wait until all of them are right.

In: the path of an artifact whose envelope and tokens are verified, then its blobs.
Out: files below the cache's staging directory, for what is not stored yet.

* The part of the path that is stored already is leased first, so that the room which
  is then reserved for the rest is not made by evicting it. Retention may have taken
  blobs from its nodes: these are staged again.
* Nothing is written that the namespace's hourly budget does not leave; what was written
  is counted then, whatever comes of it.
* Nothing is written before its bytes are reserved.
* `discard` undoes all of it, whatever was done so far.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.parts import Blob
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.manifest.verified import BlobEntry, VerifiedNode
from kvport.snapshot.cache.account import NODE_BYTES, Reservation, whole_blocks
from kvport.snapshot.cache.budget import Allowance
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.leases import LEASE_SECONDS, Lease
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.cache.regular import create, flush
from kvport.snapshot.errors import GoneError

_BUFFER_BYTES: Final = MIB


class Staging:
    """The staged blobs of one import; a `container.Receiver`.

    Attributes:
        nodes: the artifact's path, once `begin` was called.
        tokens: encoded ids of its prefix, likewise.
        files: staged blobs by digest, each whole and right.
        reservation: holds the room of what is staged, once `begin` was called.
    """

    def __init__(self, cache: Cache, namespace: Namespace, import_id: str) -> None:
        """Staging for one import; touches nothing yet."""
        self.nodes: Sequence[VerifiedNode] = ()
        self.tokens = b""
        self.files: dict[BlobDigest, Path] = {}
        self.reservation: Reservation | None = None
        self._cache = cache
        self._namespace = namespace
        self._id = import_id
        self._directory = Path()
        self._missing: dict[BlobDigest, Blob] = {}
        self._allowance: Allowance | None = None
        self._writing: tuple[BlobDigest, BinaryIO] | None = None
        self._lease: Lease | None = None
        self._undo = contextlib.ExitStack()

    def begin(self, nodes: Sequence[VerifiedNode], tokens: bytes) -> None:
        """Lease what is stored of the path, and reserve room for the rest.

        Raises:
            WriteBudgetError: as much may not be written now.
            CapacityError: the cap, or what is in use, leaves no room.
            StorageError: the volume refused.
        """
        self.nodes, self.tokens = nodes, tokens
        stored = self._lease_stored()
        held = self._held(stored)
        self._missing = {
            blob.digest: blob
            for node in nodes
            for blob in node.blobs.values()
            if blob.digest not in held
        }
        files = {
            blob.digest: whole_blocks(blob.size + _trailer(node, blob))
            for node in nodes
            for blob in node.blobs.values()
            if blob.digest in self._missing
        }
        self._allowance = self._cache.allow(self._namespace, sum(files.values()))
        self._undo.callback(self._allowance.release)
        # With room for the rows: better refused now than after the last byte.
        self.reservation = self._cache.reserve(
            sum(blob.size for blob in self._missing.values())
            + (len(nodes) - stored) * NODE_BYTES,
            files=len(self._missing),
        )
        self._undo.callback(self.reservation.release)
        # Called before what was registered earlier: files go before their room does.
        self._undo.callback(self._cache.discard_staging, self._id)
        self._directory = self._cache.staging(self._id)

    def begin_blob(self, entry: BlobEntry) -> None:
        """Open a file for the blob, if it is missing.

        Raises:
            GoneError: the upload took so long that what is stored is not held any more.
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        if self._lease is not None:
            self._lease.renew(LEASE_SECONDS)
        if entry.digest in self._missing:
            with storage_io():
                path = self._directory / entry.digest.hex()
                fd = create(self._directory.parent.parent, path)
                file = os.fdopen(fd, "wb", _BUFFER_BYTES)
            self._writing = entry.digest, file

    def add(self, data: memoryview) -> None:
        """Write some of the blob.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        if self._writing is not None:
            digest, file = self._writing
            with storage_io():
                file.write(data)
            self._count(len(data))
            blob_class = self._missing[digest].blob_class
            self._cache.note_uploaded(self._namespace, blob_class, len(data))

    def end_blob(self) -> None:
        """The blob is right: write what is buffered of it.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        if self._writing is not None:
            digest, file = self._writing
            with storage_io():
                file.close()
            self._writing = None
            size = self._missing[digest].size
            self._count(whole_blocks(size) - size)
            self.files[digest] = self._directory / digest.hex()

    def flush(self) -> None:
        """Flush all files to the medium, so that admission need not wait for it.

        The cache admits under a lock, and flushes again: what is flushed takes no time.

        Raises:
            StorageError: the volume refused.
        """
        with storage_io():
            for path in self.files.values():
                flush(path)

    def discard(self) -> None:
        """Remove what is staged, and let room and lease go; again does nothing.

        Raises:
            StorageError: the volume refused; room and lease are let go all the same.
        """
        if self._writing is not None:
            _, file = self._writing
            self._writing = None
            # What its buffer holds may not fit the volume; it is not wanted anyway.
            with contextlib.suppress(OSError):
                file.close()
        self._undo.close()

    def _count(self, nbytes: int) -> None:
        """Bytes were written, whatever comes of them."""
        if self._allowance is not None:
            self._allowance.spend(nbytes)

    def _lease_stored(self) -> int:
        """How many nodes are stored, from the root on; the last one is leased."""
        owner = f"import {self._id}"
        lease = self._cache.lease(self._namespace, ROOT_NODE, owner)
        self._undo.callback(lease.release)
        # A node is stored only if its parent is: the last one is found by halving.
        low, high = 0, len(self.nodes)
        while low < high:
            middle = (low + high + 1) // 2
            try:
                lease.move(self.nodes[middle - 1].id)
            except GoneError:
                high = middle - 1
            else:
                low = middle
        if low:
            self._lease = lease
        return low

    def _held(self, stored: int) -> frozenset[BlobDigest]:
        """The blobs of the path's first nodes, which are leased."""
        if not stored:
            return frozenset()
        path = self._cache.path(self._namespace, self.nodes[stored - 1].id)
        return frozenset(ref.digest for node in path for ref in node.blobs)


def _trailer(node: VerifiedNode, blob: Blob) -> int:
    """Bytes that follow a blob in its file, once it is admitted."""
    rows = node.end - node.start
    return rows * TOKEN_SIZE if blob.blob_class is BlobClass.KV else 0
