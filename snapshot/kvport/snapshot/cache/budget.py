"""Write budgets: how much was written for each namespace within the last hour.

In: bytes that are to be written, and that were. Out: allowances, so that what is being
written counts before it is. A drive wears with what is written to it, whoever asked for
that, and whatever comes of it. Counted by the minute, for an hour that slides
with the clock, sleep included; the count lives as long as the process, so a restart
begins a new hour, and a volume that goes and returns does not.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from kvport.snapshot.cache.clock import boot_seconds
from kvport.snapshot.errors import WriteBudgetError

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
        self._allowed: Final[Counter[str]] = Counter()

    def add(self, namespace_id: str, nbytes: int, *, allowed: int = 0) -> None:
        """Count bytes that were written; so many of them are not held any more."""
        minute = int(self._clock() // _MINUTE)
        with self._lock:
            self._allowed[namespace_id] -= allowed
            written = self._written.setdefault(namespace_id, deque())
            if written and written[-1][0] == minute:
                nbytes += written.pop()[1]
            written.append((minute, nbytes))

    def spent(self, namespace_id: str) -> int:
        """Bytes written within the last hour, and up to a minute before."""
        with self._lock:
            return self._spent(namespace_id)

    def allow(self, namespace_id: str, nbytes: int, limit: int | None) -> None:
        """Hold so many bytes more within an hour's limit; None is none.

        Raises:
            WriteBudgetError: the limit does not leave as much.
        """
        with self._lock:
            if limit is not None:
                spent = self._spent(namespace_id) + self._allowed[namespace_id]
                if spent + nbytes > limit:
                    raise WriteBudgetError(
                        f"of {limit} bytes an hour {max(0, limit - spent)} are left,"
                        f" and {nbytes} are to be written"
                    )
            self._allowed[namespace_id] += nbytes

    def give_back(self, namespace_id: str, nbytes: int) -> None:
        """Hold so many bytes less: they are not written."""
        with self._lock:
            self._allowed[namespace_id] -= nbytes

    def _spent(self, namespace_id: str) -> int:
        oldest = int((self._clock() - HOUR) // _MINUTE)
        written = self._written.get(namespace_id, deque())
        while written and written[0][0] < oldest:
            written.popleft()
        return sum(nbytes for _, nbytes in written)


class Allowance:
    """Bytes of an hour's budget that someone is about to write; one thread's."""

    def __init__(self, budget: WriteBudget, namespace_id: str) -> None:
        """Begin with none."""
        self._budget: Final = budget
        self._namespace: Final = namespace_id
        self._left = 0

    def cover(self, nbytes: int, limit: int | None) -> None:
        """Hold so many bytes, with those that are held already.

        Raises:
            WriteBudgetError: the limit does not leave as much.
        """
        if (missing := nbytes - self._left) > 0:
            self._budget.allow(self._namespace, missing, limit)
            self._left += missing

    def spend(self, nbytes: int) -> None:
        """So many bytes were written, held before or not."""
        held = min(self._left, nbytes)
        self._left -= held
        self._budget.add(self._namespace, nbytes, allowed=held)

    def release(self) -> None:
        """Let go what was not written; again does nothing."""
        self._budget.give_back(self._namespace, self._left)
        self._left = 0
