"""Time: one clock for leases, another for what outlives a process.

In: the system's clocks, or a test's. Out: seconds. The boot clock counts sleep and
never goes back, but begins anew with the machine: leases end by it. Expiry and pins are
stored as seconds from the epoch, by a wall clock that others can set; the latest time
ever seen is kept in the index, so that a clock that was set back is noticed, and said
to be.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

import attrs

BEHIND: Final = 300
"""Seconds by which a clock may lag: what it is set by is no more exact."""
SAVED_EVERY: Final = 60
"""Seconds between stores of the latest time, unless something is stored anyway."""
NEVER: Final = 1 << 62
"""Later than any time."""


def boot_seconds() -> float:
    """Seconds since the machine started, sleep included; never goes back."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    # Of macOS: there it counts sleep.
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@attrs.frozen(kw_only=True)
class Clocks:
    """The two clocks, in seconds; exchanged by whoever wants another time."""

    boot: Callable[[], float] = boot_seconds
    wall: Callable[[], float] = time.time


SYSTEM: Final = Clocks()


class WallClock:
    """Seconds from the epoch that never go back; guarded by the index's lock."""

    def __init__(self, wall: Callable[[], float], seen: int) -> None:
        """Go on from the latest time that was stored, 0 for none."""
        self._wall = wall
        self._seen = self._saved = seen

    def now(self) -> int:
        """The latest time that was ever seen, also while the clock lags behind it.

        What has expired stays so, whatever the clock is set to.
        """
        self._seen = max(self._seen, int(self._wall()))
        return self._seen

    @property
    def latest(self) -> int:
        """As `now`, but not kept: to be asked without the lock."""
        return max(self._seen, int(self._wall()))

    @property
    def behind(self) -> bool:
        """Whether the system's clock is behind what was seen, and not to be trusted."""
        return self.now() - self._wall() > BEHIND

    @property
    def reading(self) -> int:
        """The time by which state is read: `NEVER` has come while the clock is behind.

        Nobody knows then whether state with an expiry has expired.
        """
        return NEVER if self.behind else self.now()

    @property
    def advanced(self) -> bool:
        """Whether the latest time is later than what is stored."""
        return self.now() > self._saved

    @property
    def unsaved(self) -> int | None:
        """The time to be stored with the next commit, None if that is not due."""
        now = self.now()
        return now if now - self._saved >= SAVED_EVERY else None

    def saved(self, seen: int) -> None:
        """A time is stored."""
        self._saved = seen
