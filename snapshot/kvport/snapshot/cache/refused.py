"""What found no room last, for as long as that is true.

In: what the limits, or the volume, had no room for. Out: why, until something is
stored, or there is room for it: since something was removed, or could be.
"""

import contextlib
from typing import Final

import attrs

from kvport.snapshot.cache.account import BLOCK
from kvport.snapshot.cache.demand import Demand
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.room import Full
from kvport.snapshot.errors import StorageError


@attrs.frozen
class _Need:
    """What found no room.

    Attributes:
        full: what is said about it.
        nbytes: how much it was.
        ns: row of the namespace that it was for; 0 for several.
        free: free bytes of the volume, where it was that, and not the limits.
    """

    full: Full
    nbytes: int
    ns: int = 0
    free: int | None = None


class Refused:
    """Of one open cache; changed by its writer."""

    def __init__(self, parts: Parts) -> None:
        self._account: Final = parts.account
        self._evictor: Final = parts.evictor
        self._index: Final = parts.index
        self._room: Final = parts.room
        self._need: _Need | None = None

    @property
    def full(self) -> Full | None:
        """Why something found no room; None once something did, or it would now."""
        if (need := self._need) is None:
            return None
        if need.free is None:
            has_room = self._account.shortfall(need.nbytes) <= 0
        else:
            has_room = self._account.numbers.free >= need.free + need.nbytes
        return None if has_room else need.full

    def by_limits(self, nbytes: int, ns: int) -> None:
        """The cap or the floor have no room for so much in a namespace."""
        self._need = _Need(self._room.refusal(self.full, nbytes), nbytes, ns)

    def by_volume(self, nbytes: int) -> None:
        """The volume is full, whatever the limits say."""
        full = Full.now("the volume is full", self.full)
        with contextlib.suppress(StorageError), self._evictor.changes:
            self._room.look(now=True)
        nbytes = max(nbytes, BLOCK)
        self._need = _Need(full, nbytes, free=self._account.numbers.free)

    def clear(self) -> None:
        """Something was stored."""
        self._need = None

    def reconsider(self) -> None:
        """See whether a removal would make room for it.

        Raises:
            StorageError: the index could not be read.
        """
        if (need := self._need) is None or need.free is not None:
            return
        with self._evictor.changes, self._index.lock:
            missing = self._account.shortfall(need.nbytes)
            demand = Demand(missing=missing, by=frozenset([need.ns]))
            freed = sum(one.nbytes for one in self._evictor.choice().victims(demand))
            if need.nbytes <= self._account.usable and missing <= freed:
                self._need = None
