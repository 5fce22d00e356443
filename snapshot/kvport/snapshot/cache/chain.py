"""A chain: one request's growing path, handed to the writer segment by segment.

In: segments, each starting where the one before ends. Out: items for the writer's
queue. Once a segment could not be stored the chain is broken: what follows would hang
on nothing, so it is skipped and counted. What is stored is held by a lease that begins
anew with each segment.
"""

from collections.abc import Callable
from typing import Final

import attrs
import structlog

from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import Namespace, NewSegment, Pin
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.stats import Counters, SkipReason

_log = structlog.get_logger(__name__)


@attrs.frozen(eq=False)
class Item:
    """One entry of the queue; `segment` is None where a chain ends."""

    chain: "Chain"
    segment: NewSegment | None
    nbytes: int


class Chain:
    """Appended to by one thread, stored by the writer's.

    Attributes:
        namespace: where it is stored.
        ns: the namespace's row.
        retention: what is kept of the path once the chain has ended; None for all.
        ttl: seconds after its last use until what is stored expires; None for the
            namespace's.
        pin: of the last node that is stored, once the chain has ended; None for none.
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
        self.tip = tip
        self.head = tip
        self.broken: str | None = None
        self._put = put
        self._hold = hold
        self._lease = hold(tip)
        self._may_store = may_store
        self._counters = counters
        self._end = end
        self._closed = False

    def append(self, segment: NewSegment) -> None:
        """Queue a segment; waits while the queue is full.

        Raises:
            ValueError: it does not start where the chain ends, its tokens do not fill
                it, or the chain was closed.
        """
        tokens = (segment.end - segment.start) * TOKEN_SIZE
        if self._closed or segment.start != self._end or segment.start >= segment.end:
            raise ValueError("a segment must start where its open chain ends")
        if len(segment.tokens) != tokens:
            raise ValueError("a segment must carry the tokens of its rows")
        self._end = segment.end
        if self.broken is None and not self._may_store(self.namespace.id):
            # As an operator wants it: not worth a word in the log.
            self.broken = SkipReason.TIER.value
        if self.broken is not None:
            self.skip(SkipReason(self.broken), segment.start)
        elif (refusal := self._put(Item(self, segment, segment.nbytes))) is not None:
            self.lose(refusal)

    def close(self) -> None:
        """End the chain: its lease ends once all that was appended is stored."""
        if not self._closed:
            self._closed = True
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
