"""The paged SSD cache: prefix states as a tree of segments, on one root.

In: segments of running requests (`chain`), verified imports (`admit`), tokens to look
up (`match`). Out: paths, blobs, numbers. This is the facade; the parts say how.

Visible means durable. The truth about files is the index; a blob's digest is checked on
the bytes that are loaded; nothing goes without a counted reason, and nothing is written
before its bytes are reserved under the cap.
"""

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final, Self

import structlog

from kvport.manifest.digests import BlobDigest
from kvport.manifest.identity import KeyId, StateIdentity
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache import tree
from kvport.snapshot.cache.account import (
    BLOCK,
    NODE_BYTES,
    Account,
    Reservation,
)
from kvport.snapshot.cache.admission import Admission
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.chain import Chain
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files, remove_tree, storage_io
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.reader import Reader
from kvport.snapshot.cache.records import (
    Admitted,
    BlobRef,
    Match,
    Namespace,
    NodeRecord,
    RemovalReason,
    Removed,
    Selection,
)
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.root import Claim, claim
from kvport.snapshot.cache.stats import CacheStats, Counters, cache_stats
from kvport.snapshot.cache.store import Store
from kvport.snapshot.cache.sweep import INDEX_NAME, open_index, sweep
from kvport.snapshot.cache.writer import Writer
from kvport.snapshot.errors import DiskFullError, GoneError, StorageError

__all__ = ["Cache", "Chain", "Lease", "Reservation"]

_log = structlog.get_logger(__name__)

_IMPORT_ID: Final = re.compile(r"[a-z0-9-]{1,64}", re.ASCII)


class Cache:
    """One open root. Thread-safe; `on_removed` must not call back into it."""

    def __init__(
        self,
        *,
        root: Claim,
        files: Files,
        index: Index,
        account: Account,
        evictor: Evictor,
        counters: Counters,
    ) -> None:
        self._root = root
        self._files = files
        self._index = index
        self._account = account
        self._evictor = evictor
        self._counters = counters
        self._closing = threading.Lock()
        self._closed = False
        self._reader = Reader(index, files, evictor, counters)
        self._admission = Admission(index, files, account, evictor)
        self._writer = Writer(Store(index, files, account, evictor, counters))

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        cap_bytes: int | None,
        on_removed: Callable[[Sequence[Removed]], None],
        expected_root: str | None = None,
    ) -> Self:
        """Own a root, sweep it, and evict down to the cap.

        Args:
            root: made if it does not exist, its parent does and none is expected.
            cap_bytes: allocated bytes of everything below the root; None for half of
                what is free and ours.
            on_removed: told of every node that goes, after it went.
            expected_root: id that the root must have; None takes any, or a new one.

        Raises:
            MissingRootError: the parent, or the expected root, is not there.
            ForeignRootError: the directory is no cache of this format.
            CacheInUseError: another owner is alive.
            CapacityError: the cap is too small to hold anything.
            DiskFullError: the volume is full, and not with what can be evicted.
            StorageError: the volume refused.
        """
        owned = claim(root, expected_root)
        with contextlib.ExitStack() as undo:
            undo.callback(owned.release)
            files, counters = Files(root), Counters()
            for directory in (files.namespaces, files.staging):
                files.make_directory(directory)
            ballast = Ballast(root)
            connection = open_index(
                files, owned.root_id, ballast, counters, fresh=owned.fresh
            )
            undo.callback(connection.close)
            if cap_bytes is None:
                ((ours,),) = connection.execute("SELECT total(alloc) FROM file")
                cap_bytes = int(shutil.disk_usage(root).free + ours) // 2
            account = Account(cap_bytes)
            index = Index(connection, root / INDEX_NAME, account)
            evictor = Evictor(
                index,
                files,
                account,
                ballast,
                counters=counters,
                on_removed=on_removed,
            )
            sweep(index, files, account, evictor)
            cache = cls(
                root=owned,
                files=files,
                index=index,
                account=account,
                evictor=evictor,
                counters=counters,
            )
            undo.pop_all()
        return cache

    @property
    def root_id(self) -> str:
        """Name of the root, to be expected the next time."""
        return self._root.root_id

    def close(self) -> None:
        """Store what is queued, and give the root up; again does nothing.

        Never fails: what a volume refuses at the end, the next start sweeps.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._writer.close()
                self._index.close()
            except (DiskFullError, StorageError) as error:
                _log.warning("cache_close_failed", reason=error.code)
            finally:
                self._root.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking up and reading.

    def namespace(
        self, identity: StateIdentity, scope: str, block_size: int
    ) -> Namespace:
        """The namespace of an identity in a scope; made on first use.

        Raises:
            CapacityError: the cap leaves no room for a directory.
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        namespace = Namespace.of(identity, scope, block_size)
        with self._evictor.changes:
            try:
                self._index.namespace_row(namespace.id)
            except GoneError:
                with self._evictor.reserve(NODE_BYTES):
                    self._evictor.with_room(0, lambda: self._add(namespace))
        return namespace

    def match(self, ns: Namespace, tokens: bytes, selection: Selection) -> Match | None:
        """The path that restores the most of `tokens` under the selection.

        Waits for what was appended before, so that a request that comes right after
        another sees its state. Renews the recency of the path's last node.

        Args:
            ns: where to look.
            tokens: encoded ids of the prompt.
            selection: restore points that may be taken.

        Raises:
            StorageError: the index could not be read.
        """
        self.flush()
        with self._index.lock:
            row = self._index.namespace_row(ns.id)
            found = tree.best(self._index, row, ns.layout, tokens, selection)
            if found is None:
                return None
            self._index.touch(found.n)
            return Match(self._index.path(found.n), found.position)

    def longest(self, ns: Namespace, tokens: bytes) -> int:
        """Tokens of the prefix that are stored, restorable or not."""
        self.flush()
        anything = Selection(limit=len(tokens) // TOKEN_SIZE, local=KeyId(""))
        row = self._index.namespace_row(ns.id)
        with self._index.lock:
            return tree.longest(self._index, row, tokens, anything)

    def path(self, ns: Namespace, tip: NodeId) -> tuple[NodeRecord, ...]:
        """The nodes from the root to `tip`, which is the last.

        Raises:
            GoneError: it was removed.
        """
        with self._index.lock:
            n = self._index.find(self._index.namespace_row(ns.id), tip)
            if n is None:
                raise GoneError("the path was removed")
            return self._index.path(n)

    def lease(self, ns: Namespace, tip: NodeId, owner: str) -> Lease:
        """Keep a node and all above it from eviction.

        Raises:
            GoneError: it was removed.
        """
        row = self._index.namespace_row(ns.id)
        return self._evictor.leases.acquire(row, tip, owner)

    def read(self, ns: Namespace, ref: BlobRef) -> bytearray:
        """A whole blob; size and digest are those of the bytes returned.

        Raises:
            DamagedError: they are not; the nodes that own the blob are gone now, with
                all below them.
            GoneError: it was removed by design.
            StorageError: no file could be opened.
        """
        return self._reader.read(ns, ref)

    def open_blob(self, ns: Namespace, ref: BlobRef) -> FileIO:
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

    def has_blob(self, ns: Namespace, digest: BlobDigest) -> bool:
        """Whether a blob is stored."""
        row = self._index.namespace_row(ns.id)
        return self._index.file_size(row, digest) is not None

    # Storing.

    def chain(
        self,
        ns: Namespace,
        tip: NodeId,
        owner: str,
        retention: Retention | None = None,
    ) -> Chain:
        """Begin a path below `tip`, which is leased until it has ended.

        Then the path is pruned by `retention`; None keeps all of it.

        Raises:
            GoneError: it was removed.
        """
        with self._index.lock:
            row = self._index.namespace_row(ns.id)
            lease = self._evictor.leases.acquire(row, tip, owner, reading=False)
            end = self._index.end_of(row, tip)
        return Chain(
            put=self._writer.put,
            counters=self._counters,
            namespace=ns,
            ns=row,
            lease=lease,
            end=end,
            retention=retention,
        )

    def flush(self) -> None:
        """Return once all that was appended before is durable and visible."""
        self._writer.flush()

    def reserve(self, nbytes: int, *, files: int = 1) -> Reservation:
        """Hold room for staged files, evicting for it.

        Args:
            nbytes: size of all files together.
            files: how many there are; each may take a bit more than its size.

        Raises:
            CapacityError: the cap, or what is in use, leaves no room.
            StorageError: the index could not be written.
        """
        whole = -(-nbytes // BLOCK) * BLOCK
        return self._evictor.reserve(whole + files * 3 * BLOCK)

    def staging(self, import_id: str) -> Path:
        """A directory for an upload, on the cache's volume; made on first use.

        Raises:
            ValueError: the id is no plain name.
            StorageError: the volume refused.
        """
        path = self._staging_path(import_id)
        with self._evictor.reserve(2 * BLOCK):
            self._files.make_directory(path)
            self._measure()
        return path

    def discard_staging(self, import_id: str) -> None:
        """Remove an upload's directory; to be done before its reservation ends."""
        with storage_io():
            remove_tree(self._staging_path(import_id))
        self._measure()

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
            CapacityError: no room for the rows.
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        row = self._index.namespace_row(ns.id)
        return self._admission.admit(ns, row, nodes, staged, reservation)

    # Numbers.

    def stats(self) -> CacheStats:
        """All numbers, as of now."""
        leases = self._evictor.leases
        return cache_stats(self._index, self._account, leases, self._counters)

    def _add(self, namespace: Namespace) -> None:
        self._files.make_directory(self._files.namespace(namespace.id))
        self._index.add_namespace(namespace)
        self._measure()

    def _measure(self) -> None:
        self._account.measured(overhead=self._files.overhead_bytes())

    def _staging_path(self, import_id: str) -> Path:
        if not _IMPORT_ID.fullmatch(import_id):
            raise ValueError("an import's id must be a plain name")
        return self._files.staging / import_id
