"""A chain: one request's growing path, handed to the writer segment by segment.

In: segments, each starting where the one before ends. Out: items for the writer's
queue. Once a segment could not be stored the chain is broken: what follows would hang
on nothing, so it is skipped and counted. What is stored is held by a lease that begins
anew with each segment. The lease keeps it from eviction only: its life is counted from
the chain's last use, whenever it is stored.
"""

from collections.abc import Callable
from typing import Final

import attrs
import structlog

from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.lifetimes import Lifetimes
from kvport.snapshot.cache.records import Namespace, NewSegment, Pin
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.stats import Counters, SkipReason

_log = structlog.get_logger(__name__)


@attrs.frozen(eq=False)
class Item:
    """One entry of the queue; without a segment a chain ends, or was used."""

    chain: "Chain"
    segment: NewSegment | None
    nbytes: int
    ends: bool = True


class Chain:
    """Appended to by one thread, stored by the writer's.

    Attributes:
        namespace: where it is stored.
        ns: the namespace's row.
        retention: what is kept of the path once the chain has ended; None for all.
        ttl: seconds after its last use until what is stored expires; None for the
            namespace's.
        pin: of the last node that is stored, once the chain has ended; None for none.
        used: when what it brings was last used, in seconds from the epoch.
        closed: whether all was appended.
        tip: last node that is durable and visible.
        head: last node that the writer has seen; its own.
        broken: why nothing more is stored, None while all is well.
    """

    def __init__(
        self,
        *,
        put: Callable[[Item], SkipReason | None],
        hold: Callable[[NodeId], Lease],
        may_store: Callable[[str], bool],
        counters: Counters,
        lifetimes: Lifetimes,
        namespace: Namespace,
        ns: int,
        tip: NodeId,
        end: int,
        retention: Retention | None,
        ttl: int | None,
        pin: Pin | None,
    ) -> None:
        """Begin at a node, which is held from now on.

        Raises:
            GoneError: it was removed.
        """
        self.namespace: Final = namespace
        self.ns: Final = ns
        self.retention: Final = retention
        self.ttl: Final = ttl
        self.pin: Final = pin
        self.used = lifetimes.now()
        self.closed = False
        self.tip = tip
        self.head = tip
        self.broken: str | None = None
        self._put = put
        self._hold = hold
        self._lease = hold(tip)
        self._may_store = may_store
        self._counters = counters
        self._lifetimes = lifetimes
        self._end = end

    @property
    def is_over(self) -> bool:
        """Whether what it brings, and is not stored yet, has expired since.

        Not if it is to be pinned, which goes before its time to live.
        """
        if self.pin is not None:
            return False
        return self._lifetimes.is_over(self.namespace.id, self.ttl, self.used)

    @property
    def is_current(self) -> bool:
        """Whether what it brings, and is not stored yet, may be read."""
        return self._lifetimes.is_current(self.namespace.id, self.ttl, self.used)

    def use(self) -> None:
        """What it brings was used now: what is not stored yet, and what is.

        May be called by any thread, also once the chain has ended.
        """
        self.used = self._lifetimes.now()
        self._put(Item(self, None, 0, ends=False))

    def renew(self) -> None:
        """Let what is stored live on from the last use."""
        self._lifetimes.renew(self.ns, self.tip, self.used)

    def append(self, segment: NewSegment, *, late: bool = False) -> None:
        """Queue a segment; waits while the queue is full.

        Args:
            segment: what follows.
            late: whether it was made at the last use, and not just now.

        Raises:
            ValueError: it does not start where the chain ends, its tokens do not fill
                it, or the chain was closed.
        """
        tokens = (segment.end - segment.start) * TOKEN_SIZE
        if self.closed or segment.start != self._end or segment.start >= segment.end:
            raise ValueError("a segment must start where its open chain ends")
        if len(segment.tokens) != tokens:
            raise ValueError("a segment must carry the tokens of its rows")
        self._end = segment.end
        if not late:
            self.used = self._lifetimes.now()
        if self.broken is None and not self._may_store(self.namespace.id):
            # As an operator wants it: not worth a word in the log.
            self.broken = SkipReason.TIER.value
        if self.broken is not None:
            self.skip(SkipReason(self.broken), segment.start)
        elif (refusal := self._put(Item(self, segment, segment.nbytes))) is not None:
            self.lose(refusal)

    def close(self) -> None:
        """End the chain: its lease ends once all that was appended is stored."""
        if not self.closed:
            self.closed = True
            # Once that is refused the lease has no meaning: its cache is closed. To
            # end it would wait for a lock that a dead volume may hold.
            self._put(Item(self, None, 0))

    def advance(self, tip: NodeId) -> None:
        """What was stored last is the end of the chain now, and held for a new while.

        Raises:
            GoneError: it was removed.
        """
        before, self._lease = self._lease, self._hold(tip)
        before.release()
        self.tip = tip

    def release(self) -> None:
        """Let the path go; a second time does nothing."""
        self._lease.release()

    def skip(self, reason: SkipReason, start: int) -> None:
        """Count a segment that is not stored; break the chain there if it is whole."""
        if self.broken is None:
            _log.warning("cache_chain_broken", start=start, reason=reason.value)
        self.lose(reason)

    def lose(self, reason: SkipReason) -> None:
        """As `skip`, without a word: whoever closes the cache says it once for all."""
        if self.broken is None:
            self.broken = reason.value
        self._counters.add_skipped(self.namespace.id, reason)
