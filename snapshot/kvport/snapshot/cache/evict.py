"""Eviction: room for what is to be written, under the cap, the quotas and the floor.

In: bytes that are needed. Out: room on the account, or on a full volume. Whose state
makes it, `victims` says; `Remover` removes it.
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import attrs
import structlog

from kvport.snapshot.cache.account import (
    NODE_BYTES,
    Account,
    Reservation,
    allocation_bound,
    ballast_of,
)
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.clock import Clocks
from kvport.snapshot.cache.demand import Demand, Victim
from kvport.snapshot.cache.files import Files, storage_io
from kvport.snapshot.cache.index import GoneNode, Index
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.cache.policies import Policies, Standing
from kvport.snapshot.cache.records import RemovalReason, Removed
from kvport.snapshot.cache.removal import Remover
from kvport.snapshot.cache.room import Room
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.cache.victims import Choice
from kvport.snapshot.errors import (
    CapacityError,
    DiskFullError,
    QuotaError,
    StorageError,
)

_log = structlog.get_logger(__name__)

_TURN: Final = 0.25
"""Seconds after which a long removal lets others have their turn."""

_Result = TypeVar("_Result")


class Evictor(Remover):
    """Makes room; see the module."""

    def __init__(
        self,
        index: Index,
        files: Files,
        account: Account,
        ballast: Ballast,
        *,
        clocks: Clocks,
        policies: Policies,
        room: Room,
        counters: Counters,
        on_removed: Callable[[Sequence[Removed]], None],
    ) -> None:
        super().__init__(
            index,
            files,
            account,
            ballast,
            clocks=clocks,
            counters=counters,
            on_removed=on_removed,
        )
        self._policies: Final = policies
        self._room: Final = room

    def reserve(self, nbytes: int, by: Iterable[int] = ()) -> Reservation:
        """Hold `nbytes`, evicting for them where needed.

        Args:
            nbytes: how many.
            by: rows of namespaces that need them: their own state goes before this
                fails, protected or not.

        Raises:
            CapacityError: leased and protected state leaves no room; or nothing could,
                and then nothing is evicted.
            StorageError: the index could not be written.
        """
        if self.changes.acquire(blocking=False):
            # Else whoever has them looks.
            try:
                self._room.look()
            finally:
                self.changes.release()
        if self._account.take(nbytes):
            return Reservation(self._account, nbytes)
        with self.changes:
            self._room.look(now=True)
            while not self._account.take(nbytes):
                if nbytes > self._account.usable:
                    raise CapacityError("larger than what the cache may hold now")
                missing = self._account.shortfall(nbytes)
                demand = Demand(missing=missing, by=frozenset(by))
                if missing > 0 and (self._room.paused or not self._some(demand).nodes):
                    raise CapacityError("what is in use leaves no room")
        return Reservation(self._account, nbytes)

    def reserve_at_last(self, nbytes: int) -> Reservation:
        """Hold a few bytes for what must be, if need be of the headroom.

        Raises:
            CapacityError: the cap itself has no room for them.
            StorageError: the index could not be written.
        """
        try:
            return self.reserve(nbytes)
        except CapacityError:
            if not self._account.take_headroom(nbytes):
                raise
            return Reservation(self._account, nbytes)

    def within_quota(self, ns: int, namespace_id: str, nbytes: int) -> bool:
        """See to it that a namespace may hold `nbytes` more; whether anything went.

        Raises:
            QuotaError: its quota is smaller, or what is in use leaves no room.
            StorageError: the index could not be written.
        """
        quota = self._policies[namespace_id].quota_bytes
        if quota is None:
            return False
        with self.changes:
            excess = self._policies.used(ns) + nbytes - quota
            if excess <= 0:
                return False
            if nbytes > quota:
                raise QuotaError("larger than the namespace's quota")
            self._some(Demand(missing=excess, only=ns))
            if self._policies.used(ns) + nbytes > quota:
                raise QuotaError("what is in use leaves no room under the quota")
            return True

    def evict(self, demand: Demand) -> Freed:
        """Remove for a demand, in batches; others get their turn in between.

        Raises:
            DiskFullError: the volume has no room for the first of them.
            StorageError: the index could not be written.
        """
        freed = Freed()
        while True:
            rest = attrs.evolve(demand, missing=max(0, demand.missing - freed.nbytes))
            with self.changes:
                some = self._some(rest, seconds=_TURN)
            freed += some
            if not some.nodes:
                return freed
            time.sleep(_TURN / 50)

    def choice(
        self,
        standings: Mapping[int, Standing] | None = None,
        unpinned: Container[int] = (),
    ) -> Choice:
        """A choice over the index as it is, for a plan or a removal.

        Args:
            standings: of namespaces, those of now if None.
            unpinned: rows of nodes whose pins end before.
        """
        return Choice(
            self._index,
            self.leases,
            self._policies.standings() if standings is None else standings,
            # While the clock is behind, nothing has expired.
            now=0 if self._index.clock.behind else self._index.clock.now(),
            unpinned=unpinned,
        )

    # A volume without room.

    def small_change(self, change: Callable[[], _Result]) -> _Result:
        """What `change` returns, which adds to the index no more than a node does.

        Raises:
            CapacityError: the cap itself has no room for it.
            DiskFullError: the volume is full of other things, or of what is in use.
            StorageError: the index could not be written.
        """
        with self.changes, self.reserve_at_last(NODE_BYTES):
            return self.with_room(0, change)

    def with_room(
        self, nbytes: int, change: Callable[[], _Result], by: Iterable[int] = ()
    ) -> _Result:
        """What `change` returns; if the volume is full of our own, it is tried twice.

        In between the oldest leaves go, until their files gave back `nbytes` and as
        much as the ballast needs, in the end those of the namespaces `by`. `changes`
        must be held.

        Raises:
            DiskFullError: the volume is full of other things, or of what is in use.
        """
        try:
            return change()
        except DiskFullError:
            if not self.free(nbytes + 2 * self._account.ballast, by):
                raise
        return change()

    def free(self, nbytes: int, by: Iterable[int] = ()) -> bool:
        """Evict until files have given back `nbytes`; whether anything went.

        Goes by the account, not by what the volume then says it has: with snapshots,
        or a busy neighbour, that would cost the whole cache.

        Raises:
            StorageError: the index could not be written.
        """
        with self.changes:
            target = self._account.numbers.blobs - nbytes
            went = 0
            while (missing := self._account.numbers.blobs - target) > 0:
                freed = self._some(Demand(missing=missing, by=frozenset(by)))
                if not freed.nodes:
                    break
                went += 1
            return bool(went)

    def fit_ballast(self) -> None:
        """Give back what the ballast of a larger cap has too much.

        Raises:
            StorageError: the volume refused.
        """
        with self.changes, self.measuring(), storage_io():
            self._files.check_root()
            self._ballast.shrink(self._account.ballast)

    def spared_ballast(self, cap: int) -> int:
        """Bytes that the ballast would give back under another cap."""
        return self._ballast.beyond(ballast_of(cap))

    def ensure_reserve(self) -> None:
        """Evict for free bytes on the volume, as many as the ballast has, and make it.

        Raises:
            StorageError: the index could not be written.
        """
        size = self._account.ballast
        # Twice, since the first removal may take the ballast.
        for _ in range(2):
            wanted = size if self._ballast.stands(size) else 3 * size
            missing = wanted - self._ballast.free_bytes()
            if missing > 0:
                self.free(missing)
        self.renew_ballast()

    def renew_ballast(self) -> None:
        """Make the ballast where it is missing, if the volume has room for two."""
        size = self._account.ballast
        if self._ballast.stands(size) or self._ballast.free_bytes() < 2 * size:
            return
        if self._account.numbers.floor and self._account.shortfall(2 * size) > 0:
            # The floor is one already.
            return
        try:
            self._files.check_root()
            self._drop_ballast()
            with self.reserve(allocation_bound(size)), self.measuring(), storage_io():
                self._ballast.make(size)
        except (CapacityError, DiskFullError, StorageError) as error:
            _log.warning("cache_ballast_missing", reason=error.code)

    def _some(self, demand: Demand, seconds: float = math.inf) -> Freed:
        """Remove for a demand, for so long at most; all is done if nothing went.

        `changes` must be held.
        """
        end = time.monotonic() + seconds
        before = self._account.numbers
        with self._index.lock, contextlib.suppress(DiskFullError):
            # Without room for it, the order is the one of the last commit.
            self.relieved(self._index.store_touched)
        victims = self.choice().victims(demand)
        nodes: Counter[RemovalReason] = Counter()
        whole = True
        while whole and time.monotonic() < end:
            # Under the lock, so that no lease comes between choice and removal.
            with self._index.lock:
                batch = list(itertools.islice(victims, self._index.rows_per_removal))
                gone = self._commit_batch(batch)
            whole = bool(batch) and sum(len(some) for _, some in gone) == len(batch)
            for reason, some in gone:
                nodes[reason] += len(some)
                self._finish(some, reason)
        nbytes = before.blobs - self._account.numbers.blobs
        self._room.removed(nbytes, before.free)
        return Freed(nbytes, nodes)

    def _commit_batch(
        self, batch: Sequence[Victim]
    ) -> list[tuple[RemovalReason, list[GoneNode]]]:
        """Remove rows, a commit for each reason; stops where one is cut."""
        done: list[tuple[RemovalReason, list[GoneNode]]] = []
        for reason, victims in itertools.groupby(batch, lambda victim: victim.reason):
            nodes = [victim.n for victim in victims]
            gone = self._commit(nodes)
            done.append((reason, gone))
            if len(gone) < len(nodes):
                break
        return done
