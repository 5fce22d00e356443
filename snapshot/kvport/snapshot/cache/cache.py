"""The paged SSD cache: prefix states as a tree of segments, on one root.

In: segments of running requests (`chain`), verified imports (`admit`), tokens to look
up (`match`). Out: paths, blobs, numbers. This is the facade; the parts say how.

Visible means durable. The truth about files is the index; a blob's digest is checked on
the bytes that are loaded; nothing goes without a counted reason, and nothing is written
before its bytes are reserved under the cap.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import structlog

from kvport.manifest.digests import BlobDigest
from kvport.manifest.identity import StateIdentity
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.account import Reservation
from kvport.snapshot.cache.administration import Administration
from kvport.snapshot.cache.admission import Admission
from kvport.snapshot.cache.chain import Chain
from kvport.snapshot.cache.clock import SYSTEM, Clocks
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.maintenance import EVERY, Maintenance
from kvport.snapshot.cache.namespaces import Judge
from kvport.snapshot.cache.numbers import CacheStats, Numbers
from kvport.snapshot.cache.opening import Parts, open_root
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.cache.policies import SettingsOf
from kvport.snapshot.cache.policy import DEFAULT, NamespaceSettings
from kvport.snapshot.cache.reading import Reading
from kvport.snapshot.cache.records import (
    Admitted,
    Match,
    Namespace,
    NodeRecord,
    Pin,
    Removed,
    Selection,
)
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.room import Full
from kvport.snapshot.cache.stats import Counters, SkipReason
from kvport.snapshot.cache.store import Store
from kvport.snapshot.cache.uploads import Uploads
from kvport.snapshot.cache.writer import Writer
from kvport.snapshot.errors import DiskFullError, GoneError, StorageError

__all__ = ["Cache", "Chain", "Lease", "Reservation"]

_log = structlog.get_logger(__name__)

_PARTING: Final = 5.0
"""Seconds that a volume that is gone gets to fail what is being written."""


class Cache(Reading):
    """One open root. Thread-safe; `on_removed` must not call back into it.

    Attributes:
        administration: what an operator sets, asks and removes.
    """

    def __init__(
        self, parts: Parts, on_failed: Callable[[], None], *, settle: bool
    ) -> None:
        super().__init__(parts)
        self._files = parts.files
        self._account = parts.account
        self._policies, self._room = parts.policies, parts.room
        self._closing = threading.Lock()
        self._closed = False
        self._numbers = Numbers(parts)
        self._admission = Admission(parts)
        self._uploads = Uploads(parts.files, parts.evictor)
        self._store = Store(parts, on_failed)
        self._writer = Writer(self._store)
        flush, every = self._writer.flush, EVERY if settle else None
        self.administration: Final = Administration(parts, self._uploads, flush)
        self._maintenance = Maintenance(self.administration.tick, every)

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        cap_bytes: int | None,
        on_removed: Callable[[Sequence[Removed]], None],
        expected_root: str | None = None,
        mac_key: bytes | None = None,
        on_failed: Callable[[], None] = lambda: None,
        counters: Counters | None = None,
        clocks: Clocks = SYSTEM,
        free_floor: int | None = None,
        settings: SettingsOf = lambda _: DEFAULT,
        judge: Judge = lambda _: {},
        settle: bool = True,
    ) -> Self:
        """Own a root, sweep it, and evict down to the cap.

        What that will remove is logged before.

        Args:
            root: made if it does not exist, its parent does and none is expected.
            cap_bytes: allocated bytes of everything below the root; None for half of
                what is free and ours.
            on_removed: told of every node that goes, after it went.
            expected_root: id that the root must have; None takes any, or a new one.
            mac_key: 32 bytes of the home, that rows are held to; None for a public key.
            on_failed: told when the volume refused a batch, and is not just full.
            counters: go on from these, and from what was written within the hour.
            clocks: by which leases, pins and state with a time to live end.
            free_floor: bytes that the volume keeps free, also while others fill it; 0
                for none, None for the larger of 10 GiB and 5 % of it.
            settings: of namespaces that there are, from the start.
            judge: which namespaces cannot be used, and why.
            settle: whether state goes for the cap's sake, or because it has expired,
                now and while it is open; else by order only.

        Raises:
            MissingRootError: the parent, or the expected root, is not there.
            ReplacedRootError: something else is where the expected root was.
            ForeignRootError: it is no cache of this format, or of another key.
            CacheInUseError: another owner is alive.
            CapacityError: the cap is too small to hold anything.
            DiskFullError: the volume is full, and not with what can be evicted.
            StorageError: the volume refused.
        """
        parts = open_root(
            root,
            cap_bytes=cap_bytes,
            on_removed=on_removed,
            expected_root=expected_root,
            mac_key=mac_key,
            clocks=clocks,
            counters=counters or Counters(clocks.boot),
            free_floor=free_floor,
            settings=settings,
            judge=judge,
        )
        cache = cls(parts, on_failed, settle=settle)
        try:
            if settle:
                cache.administration.start()
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def full(self) -> Full | None:
        """Why nothing can be stored; None as soon as something was."""
        return self._room.full or self._store.full

    @property
    def stalled(self) -> bool:
        """Whether the volume takes longer for a batch than any that is in order."""
        return self._writer.stalled

    def close(self, progress: Callable[[int], None] | None = None) -> None:
        """Store what is queued, and give the root up; again does nothing.

        Never fails: what a volume refuses at the end, the next start sweeps. Waits as
        long as the volume gets on; what is left if it does not is lost, and counted.

        Args:
            progress: told about once a second how many bytes are left; else logged.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                self._maintenance.stop(_PARTING)
                if not self._writer.close(self._end, progress):
                    _log.error("cache_close_gave_up")

    def abandon(self) -> None:
        """Close without storing what is queued, since the volume is gone.

        What was queued is counted as skipped. Calls that are under way end with an
        error. A volume that hangs is not waited for: the root stays ours until it
        lets go.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                self._maintenance.stop(0)
                self._writer.abandon(self._end, _PARTING)

    def _end(self) -> None:
        try:
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
        self,
        identity: StateIdentity,
        scope: str,
        block_size: int,
        *,
        model: str = "",
        source: str = "",
        loaded: int = 0,
    ) -> Namespace:
        """The namespace of an identity in a scope; made on first use.

        If a `model` was `loaded` for it (epoch seconds), from `source`, that is kept.

        Raises:
            CapacityError: the cap leaves no room for a directory.
            DiskFullError: the volume is full.
            StorageError: the volume refused.
        """
        namespace = Namespace.of(identity, scope, block_size)

        def add() -> None:
            with self._evictor.measuring():
                self._files.make_directory(self._files.namespace(namespace.id))
                self._index.add_namespace(namespace, model, source, loaded)
                self._policies.namespaces.changed()

        with self._evictor.changes:
            try:
                self._index.namespace_row(namespace.id)
                if model:
                    self._evictor.relieved(add)
            except GoneError:
                self._evictor.small_change(add)
        return namespace

    def match(
        self, ns: Namespace, tokens: bytes, selection: Selection, *, count: bool = True
    ) -> Match | None:
        """The path that restores the most of `tokens` under the selection.

        Waits for what was appended before: a request sees the state of the one before
        it. Renews the recency of the path's last node. None if the namespace is off.

        Args:
            ns: where to look.
            tokens: encoded ids of the prompt.
            selection: restore points that may be taken.
            count: whether it is a request's, and so a hit or a miss.

        Raises:
            StorageError: the index could not be read.
        """
        if not self._policies.restores(ns.id):
            if count:
                self._counters.add_refused_lookup(ns.id)
            return None
        self.flush()
        found = self._lookup.match(ns, tokens, selection)
        if count:
            self._counters.add_lookup(ns.id, hit=found is not None)
        return found

    def longest(self, ns: Namespace, tokens: bytes) -> int:
        """Tokens of the prefix that are stored, restorable or not.

        To the token where there are rows, else in whole segments.
        """
        self.flush()
        return self._lookup.longest(ns, tokens)

    # Storing.

    def chain(
        self,
        ns: Namespace,
        tip: NodeId,
        owner: str,
        retention: Retention | None = None,
        *,
        ttl: int | None = None,
        pin: Pin | None = None,
    ) -> Chain:
        """Begin a path below `tip`, which is leased until it has ended.

        What is set for the namespace goes before `retention`. Nothing is stored unless
        its tier is `on`.

        Args:
            ns: where.
            tip: the node that it goes on from.
            owner: of the lease.
            retention: by which the path is pruned in the end; None keeps all of it.
            ttl: seconds after its last use until what is stored expires; None for the
                namespace's.
            pin: of the last node that is stored, or else of `tip`, in the end.

        Raises:
            GoneError: it was removed.
        """
        row = self._index.namespace_row(ns.id)
        acquire = self._evictor.leases.acquire
        with self._index.lock:
            return Chain(
                put=self._writer.put,
                may_store=self._policies.stores,
                hold=lambda node: acquire(row, node, owner, reading=False),
                counters=self._counters,
                namespace=ns,
                ns=row,
                tip=tip,
                end=self._index.end_of(row, tip),
                retention=self._policies[ns.id].retention or retention,
                ttl=ttl,
                pin=pin,
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

    # Settings and numbers.

    def settings(self, namespace_id: str) -> NamespaceSettings:
        """See `Administration.settings`."""
        return self.administration.settings(namespace_id)

    def configure(self, namespace_id: str, settings: NamespaceSettings) -> Freed:
        """See `Administration.configure`."""
        return self.administration.configure(namespace_id, settings)

    def note_unstored(self, namespace: Namespace) -> None:
        """Count a request that stores nothing, since the namespace's tier is not on."""
        self._counters.add_skipped(namespace.id, SkipReason.TIER)

    def stats(self) -> CacheStats:
        """All numbers, as of now."""
        return self._numbers.read()
