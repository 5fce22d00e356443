"""Write budgets: how much was written for each namespace within the last hour.

In: bytes that were written. Out: whether more may be. A drive wears with what is
written to it, whoever asked for that. Counted by the minute, for an hour that slides
with the clock, sleep included; the count lives as long as the process, so a restart
begins a new hour, and a volume that goes and returns does not.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvport.snapshot.cache.clock import boot_seconds

HOUR: Final = 3600
_MINUTE: Final = 60


class WriteBudget:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        """Begin with nothing written.

        Args:
            clock: seconds that never go back.
        """
        self._clock: Final = clock
        self._lock: Final = threading.Lock()
        self._written: Final[dict[str, deque[tuple[int, int]]]] = {}

    def add(self, namespace_id: str, nbytes: int) -> None:
        """Count bytes that were written."""
        minute = int(self._clock() // _MINUTE)
        with self._lock:
            written = self._written.setdefault(namespace_id, deque())
            if written and written[-1][0] == minute:
                nbytes += written.pop()[1]
            written.append((minute, nbytes))

    def spent(self, namespace_id: str) -> int:
        """Bytes written within the last hour, and up to a minute before."""
        oldest = int((self._clock() - HOUR) // _MINUTE)
        with self._lock:
            written = self._written.get(namespace_id, deque())
            while written and written[0][0] < oldest:
                written.popleft()
            return sum(nbytes for _, nbytes in written)

    def allows(self, namespace_id: str, nbytes: int, limit: int | None) -> bool:
        """Whether so many bytes more are within an hour's limit; None is none."""
        return limit is None or self.spent(namespace_id) + nbytes <= limit
