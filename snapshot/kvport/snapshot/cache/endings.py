"""Where a chain ends: its path is pinned, if so wished, let go, and pruned.

In: chains of which everything is stored, or skipped. Out: what became of a wished pin,
told to the chain; blobs that its retention does not keep are gone.
"""

import functools
from typing import Final

import structlog

from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.chain import Chain
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.pruning import prunable
from kvport.snapshot.cache.records import Pin, Pinned
from kvport.snapshot.cache.restorable import last_restorable
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.errors import (
    CapacityError,
    DiskFullError,
    GoneError,
    StorageError,
)

NOT_RESTORABLE: Final = "not_restorable"
"""Why nothing more is pinned: it is stored, and no restore point."""

_log = structlog.get_logger(__name__)


class Endings:
    """Used by who stores."""

    def __init__(self, parts: Parts) -> None:
        self._index: Final = parts.index
        self._evictor: Final = parts.evictor
        self._counters: Final = parts.counters

    def end(self, chain: Chain) -> None:
        """Pin the path of a chain that has ended, if so wished, and let it go."""
        try:
            if chain.pin is not None:
                chain.pin.told(self._pin(chain, chain.pin))
        finally:
            chain.release()

    def _pin(self, chain: Chain, wish: Pin) -> Pinned:
        if chain.tip == ROOT_NODE:
            return Pinned(0, None, chain.broken or SkipReason.GONE.value)
        try:
            if (node := self._last_restorable(chain)) is None:
                return Pinned(0, None, chain.broken or NOT_RESTORABLE)
            pin = functools.partial(
                self._evictor.pins.pin,
                chain.ns,
                node,
                wish.owner,
                wish.seconds,
                # A pin goes before the request's own ttl, also if the volume was slow.
                revive=True,
            )
            until = self._evictor.small_change(pin)
            tokens = self._index.end_of(chain.ns, node)
        except (CapacityError, GoneError, StorageError, DiskFullError) as error:
            self._counters.add_failed_pin(chain.namespace.id)
            _log.warning("cache_pin_failed", reason=error.code)
            return Pinned(0, None, error.code)
        rest = None if node == chain.tip else NOT_RESTORABLE
        return Pinned(tokens, until, chain.broken or rest)

    def _last_restorable(self, chain: Chain) -> NodeId | None:
        """The end of what a pin is good for: rows behind it restore nothing."""
        with self._index.lock:
            tip = self._index.find(chain.ns, chain.tip)
            if tip is None:
                raise GoneError("the segment to be pinned was removed")
            n = last_restorable(self._index, tip, chain.namespace.layout)
            if n is None:
                return None
            ((node,),) = self._index.all("SELECT id FROM node WHERE n = ?", (n,))
            return NodeId(node)

    def retain(self, chain: Chain, retention: Retention) -> None:
        """Prune the path of a chain that has ended; it stays whole if that fails."""
        layout = chain.namespace.layout
        if layout.full_only:
            return
        plan = functools.partial(
            prunable,
            self._index,
            self._evictor.leases,
            ns=chain.ns,
            layout=layout,
            tip=chain.tip,
            retention=retention,
        )
        try:
            with self._evictor.changes:
                self._evictor.prune(plan)
                self._evictor.renew_ballast()
        except (StorageError, DiskFullError) as error:
            self._counters.add_failed_pruning(chain.namespace.id)
            _log.warning("cache_pruning_failed", reason=error.code)
