"""A chain: one request's growing path, handed to the writer segment by segment.

In: segments, each starting where the one before ends. Out: items for the writer's
queue. Once a segment could not be stored the chain is broken: what follows would hang
on nothing, so it is skipped and counted.
"""

from collections.abc import Callable
from typing import Final

import attrs
import structlog

from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import Namespace, NewSegment
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
        lease: holds the tip, from the first segment to the end of the chain.
        tip: last node that is durable and visible.
        head: last node that the writer has seen; its own.
        broken: why nothing more is stored, None while all is well.
    """

    def __init__(
        self,
        *,
        put: Callable[[Item], bool],
        counters: Counters,
        namespace: Namespace,
        ns: int,
        lease: Lease,
        end: int,
        retention: Retention | None,
    ) -> None:
        self.namespace: Final = namespace
        self.ns: Final = ns
        self.retention: Final = retention
        self.lease: Final = lease
        self.tip: NodeId = lease.tip
        self.head: NodeId = lease.tip
        self.broken: str | None = None
        self._put = put
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
        if self.broken is not None:
            self.skip(SkipReason(self.broken), segment.start)
        elif not self._put(Item(self, segment, segment.nbytes)):
            self.skip(SkipReason.CLOSED, segment.start)

    def close(self) -> None:
        """End the chain: its lease ends once all that was appended is stored."""
        if not self._closed:
            self._closed = True
            if not self._put(Item(self, None, 0)):
                self.lease.release()

    def skip(self, reason: SkipReason, start: int) -> None:
        """Count a segment that is not stored; break the chain there if it is whole."""
        if self.broken is None:
            _log.warning("cache_chain_broken", start=start, reason=reason.value)
            self.broken = reason.value
        self._counters.add_skipped(reason)
