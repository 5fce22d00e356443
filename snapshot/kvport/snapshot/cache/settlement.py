"""Settlement: the cache within its limits, and without what is of no use.

In: limits, those of now or others. Out: a plan of what would go, or what went. A start
settles, and so does every tick of the maintenance.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import structlog

from kvport.snapshot.cache.account import headroom_of
from kvport.snapshot.cache.demand import Demand
from kvport.snapshot.cache.directories import tree_allocated
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.foreign import announce, foreign_in, is_removable
from kvport.snapshot.cache.lifetimes import apply_ttl
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.plan import Freed, Plan, draw_up
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.room import Limit
from kvport.snapshot.cache.uploads import Uploads
from kvport.snapshot.errors import DiskFullError

_log = structlog.get_logger(__name__)

ALWAYS: Final = frozenset({RemovalReason.EXPIRED, RemovalReason.QUOTA})
"""What goes without being asked for."""
_COLLECTED: Final = ALWAYS | {RemovalReason.INCOMPATIBLE, RemovalReason.POINTLESS}
"""What `gc` takes."""


class Settlement:
    """The part of `Administration` that goes by limits.

    Attributes:
        swept_bytes: allocated bytes of files of nobody that went at the opening.
    """

    def __init__(self, parts: Parts, uploads: Uploads) -> None:
        self._index: Final = parts.index
        self._files: Final = parts.files
        self._account: Final = parts.account
        self._counters: Final = parts.counters
        self._evictor: Final = parts.evictor
        self._policies: Final = parts.policies
        self._room: Final = parts.room
        self._uploads: Final = uploads
        self.swept_bytes: Final = parts.swept_bytes

    def plan(
        self,
        *,
        cap: Limit = None,
        floor: Limit = None,
        quotas: Mapping[str, int | None] | None = None,
        gc: bool = False,
    ) -> Plan:
        """What would be removed, and why; nothing is.

        Exact while nothing else happens, but for a removal so long that it takes turns
        with others: then shares are reckoned anew, under an index of another size.

        Args:
            cap: with this cap at the next start.
            floor: with this floor of free bytes, likewise.
            quotas: with these quotas by namespace, None for none; what is not named
                keeps its own.
            gc: by `gc`.

        Raises:
            CapacityError: the cap is too small to hold anything.
            StorageError: the index could not be read.
        """
        with self._evictor.changes:
            self._policies.judge()
            with contextlib.suppress(DiskFullError):
                # A removal goes by them as well.
                self._evictor.relieved(self._index.store_touched)
            self._index.checkpoint()
            self._look()
            numbers = self._room.supposed(cap, floor)
            spared = self._evictor.spared_ballast(numbers.cap)
            numbers = attrs.evolve(numbers, overhead=numbers.overhead - spared)
            headroom = headroom_of(numbers.cap)
            limit = numbers.effective - headroom
            missing = max(0, numbers.reserved - limit)
            to_evict = numbers.to_evict(headroom)
            usable = limit - numbers.index - numbers.overhead
            unpinned = self._evictor.pins.excess(numbers.cap)
            ended = self._evictor.pins.count(unpinned)
        standings = self._policies.standings(quotas, usable)
        choice = self._evictor.choice(standings, unpinned)
        always = _COLLECTED if gc else ALWAYS
        demand = self._demand(to_evict, always)
        plan = draw_up(
            choice.victims(demand),
            self._policies.namespaces.named(),
            missing,
            self._policies.incompatible,
        )
        # All that could go would: what is left of state is held.
        left = max(0, to_evict - plan.nbytes)
        in_use = min(left, max(0, numbers.blobs - plan.nbytes))
        known = {one.n: one.id for one in self._policies.namespaces.all()}
        over = {known[n]: nbytes for n, nbytes in choice.over_quota().items()}
        held = sum(over.values())
        return attrs.evolve(
            plan,
            missing=max(plan.missing, held),
            in_use=max(in_use, held),
            ended_pins=ended,
            over_quota=over,
        )

    def gc(self) -> Freed:
        """Remove what is of no use: expired, incompatible, pointless, beyond a quota.

        And files that no row speaks of: what was left under temporary names, uploads
        that nobody makes any more, and what was never the cache's.

        Raises:
            DiskFullError: the volume has no room for a removal.
            StorageError: the volume refused.
        """
        self._policies.judge()
        orphaned = self._orphaned()
        with self._evictor.changes:
            before = self._account.numbers.blobs
            self._evictor.unlink_doomed()
            # Overhead does not tell: uploads begin and end meanwhile.
            freed = before - self._account.numbers.blobs
            freed += self._remove_orphans(orphaned)
        return Freed(freed) + self._settle(_COLLECTED)

    def settle(self) -> Freed:
        """Bring the cache below its cap and its quotas; what has expired goes too.

        Raises:
            DiskFullError: the volume has no room for a removal.
            StorageError: the index could not be written.
        """
        return self._settle(ALWAYS)

    def start(self) -> None:
        """Settle as at a start: what will be removed is logged before.

        Raises:
            DiskFullError: the volume is full, and not with our own.
            StorageError: the index could not be written.
        """
        self._policies.judge()
        for one in self._policies.namespaces.all():
            ttl = self._policies[one.id].ttl
            apply_ttl(self._index, self._evictor, one.id, ttl)
        with self._evictor.changes:
            self._evictor.fit_ballast()
            self.plan().log()
            self.settle()
            self._evictor.ensure_reserve()

    def look(self) -> None:
        """Take in what the volume says; nothing is removed.

        Raises:
            StorageError: the root is not there.
        """
        with self._evictor.changes:
            self._room.look(now=True)

    def tick(self) -> None:
        """Follow the volume, and what has become of models; to be called now and then.

        Raises:
            DiskFullError: the volume has no room for a removal.
            StorageError: the index could not be written.
        """
        self._policies.judge()
        self.drop_ended_pins()
        self.settle()

    def drop_ended_pins(self) -> None:
        """Remove pins that ran out.

        Raises:
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        with self._evictor.changes:
            while self._evictor.relieved(self._evictor.pins.drop_ended):
                pass

    def _settle(self, always: frozenset[RemovalReason]) -> Freed:
        with self._evictor.changes:
            self._look()
            self._fit_pins()
            missing = 0
            if self._account.shortfall() > 0 and not self._room.paused:
                # The log of what was done counts too, and can go.
                self._index.checkpoint()
                missing = self._account.numbers.to_evict(self._account.headroom)
        demand = self._demand(missing, always)
        return self._evictor.evict(demand)

    def _demand(self, missing: int, always: frozenset[RemovalReason]) -> Demand:
        """The cap is hard: where pins leave too little for all shares, these yield."""
        by = frozenset(one.n for one in self._policies.namespaces.all())
        return Demand(missing=missing, always=always, by=by, thorough=True)

    def _look(self) -> None:
        """Take in what others have changed, below the root and on the volume.

        The changes are held.
        """
        with storage_io():
            self._evictor.measure(self._foreign())
        self._room.look(now=True)

    def _foreign(self) -> list[Path]:
        ids = {one.id for one in self._policies.namespaces.all()}
        return foreign_in(self._files.root, ids, self._uploads.open)

    def _fit_pins(self) -> None:
        """End pins that do not fit into half of the cap; the changes are held."""
        excess = self._evictor.pins.excess(self._account.numbers.cap)
        end = functools.partial(self._evictor.pins.end, excess)
        while excess and (ended := self._evictor.relieved(end)):
            for namespace, count in ended.items():
                self._counters.add_ended_pins(namespace, count)
                _log.warning("cache_pins_ended", namespace=namespace, pins=count)

    def _orphaned(self) -> list[Path]:
        """What no row speaks of at this moment, or that is being written."""
        with storage_io():
            found = [
                path
                for one in self._policies.namespaces.all()
                for path in self._files.blobs(one.id)
                if not self._index.has_file(one.n, path.name)
            ]
            return found + self._foreign()

    def _remove_orphans(self, paths: Sequence[Path]) -> int:
        """Remove those of them that are none of a change; the changes are held.

        Answers the allocated bytes that went.
        """
        rows = {
            self._files.namespace(one.id): one.n
            for one in self._policies.namespaces.all()
        }
        with storage_io():
            foreign = {
                path for path in self._foreign() if is_removable(self._files.root, path)
            }
        announce(path for path in foreign if path.parent == self._files.root)
        freed = 0
        for path in paths:
            ns = rows.get(path.parent)
            if ns is None:
                stays = path not in foreign
            else:
                stays = self._index.has_file(ns, path.name)
            if stays:
                continue
            with storage_io(), contextlib.suppress(FileNotFoundError):
                nbytes = tree_allocated(path)
                freed += nbytes if self._files.remove(path) else 0
        return freed
