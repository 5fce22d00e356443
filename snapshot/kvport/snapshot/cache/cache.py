"""The paged SSD cache: prefix states as a tree of segments, on one root.

In: segments of running requests (`chain`), verified imports (`admit`), tokens to look
up (`match`). Out: paths, blobs, numbers. This is the facade; the parts say how.

Visible means durable. The truth about files is the index; a blob's digest is checked on
the bytes that are loaded; nothing goes without a counted reason, and nothing is written
before its bytes are reserved under the cap.
"""

import threading
from collections.abc import Callable
from typing import Final, Self

import structlog

from kvport.manifest.identity import StateIdentity
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.account import Reservation
from kvport.snapshot.cache.administration import Administration
from kvport.snapshot.cache.chain import Chain
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.lifetimes import Lifetimes
from kvport.snapshot.cache.maintenance import EVERY, Maintenance
from kvport.snapshot.cache.numbers import CacheStats, Numbers
from kvport.snapshot.cache.opening import Opening, Parts, open_root
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.receiving import Receiving
from kvport.snapshot.cache.records import (
    Match,
    Namespace,
    Pin,
    Selection,
)
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.room import Full
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.cache.store import Store
from kvport.snapshot.cache.writer import Writer
from kvport.snapshot.errors import DiskFullError, GoneError, StorageError

__all__ = ["Cache", "Chain", "Lease", "Opening", "Reservation"]

_log = structlog.get_logger(__name__)

_PARTING: Final = 5.0
"""Seconds that a volume that is gone gets to fail what is being written."""


class Cache(Receiving):
    """One open root. Thread-safe.

    Attributes:
        administration: what an operator sets, asks and removes.
    """

    def __init__(self, parts: Parts, opening: Opening) -> None:
        super().__init__(parts)
        self._files = parts.files
        self._account = parts.account
        self._room = parts.room
        self._closing = threading.Lock()
        self._closed = False
        self._numbers = Numbers(parts)
        self._lifetimes = Lifetimes(parts.index)
        self._store = Store(parts, opening.on_failed)
        self._writer = Writer(self._store)
        flush, every = self._writer.flush, EVERY if opening.settle else None
        self.administration: Final = Administration(parts, self._uploads, flush)
        self._maintenance = Maintenance(self._tick, every)

    @classmethod
    def open(cls, opening: Opening) -> Self:
        """Own a root, sweep it, and evict down to the cap.

        What that will remove is logged before.

        Raises:
            MissingRootError: the parent, or the expected root, is not there.
            ReplacedRootError: something else is where the expected root was.
            ForeignRootError: it is no cache of this format, or of another key.
            CacheInUseError: another owner is alive.
            CapacityError: the cap is too small to hold anything.
            DiskFullError: the volume is full, and not with what can be evicted.
            StorageError: the volume refused.
        """
        cache = cls(open_root(opening), opening)
        try:
            if opening.settle:
                cache.administration.start()
            else:
                cache.administration.look()
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def full(self) -> Full | None:
        """Why something found no room; None as soon as there is room for it."""
        return self._room.full or self._store.refused.full

    def _tick(self) -> None:
        self.administration.tick()
        self._store.refused.reconsider()

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
                lifetimes=self._lifetimes,
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
