"""The cache's account: reserved bytes are never below what the disk holds.

In: reservations before anything is written, and measurements after. Out: whether a
reservation fits, and the numbers. All numbers are allocated bytes over everything
below the root:

* `blobs`: files that have a row;
* `index`: SQLite's database and log;
* `overhead`: directories, and the root's other files, the ballast among them;
* `held`: reservations, under which blobs, rows and staged files come to be.

Blobs and rows may fill the cap up to `headroom`. That rest is for what cannot wait for
room, since it makes room: the log of transactions that remove nodes, checkpoints.
"""

import threading
from types import TracebackType
from typing import Final, Self

import attrs

from kvport.manifest.limits import MIB
from kvport.snapshot.errors import CapacityError

BLOCK: Final = 4096
"""Unit of allocation that is reckoned with, and SQLite's page size."""
NODE_BYTES: Final = 8 * BLOCK
"""Index growth to reserve for a new node: pages in the log, then in the database."""
MIN_CAP: Final = 4 * MIB


def allocation_bound(size: int) -> int:
    """Bytes that a new file of `size` bytes takes at most, with its directory entry."""
    return -(-size // BLOCK) * BLOCK + 2 * BLOCK


@attrs.frozen
class AccountNumbers:
    """One consistent reading, in bytes."""

    cap: int
    blobs: int
    index: int
    overhead: int
    held: int

    @property
    def reserved(self) -> int:
        """The sum that stays between real use and the cap."""
        return self.blobs + self.index + self.overhead + self.held


class Account:
    """Thread-safe; see the module."""

    def __init__(self, cap: int) -> None:
        if cap < MIN_CAP:
            raise CapacityError(f"a cap below {MIN_CAP // MIB} MiB holds no state")
        self.headroom: Final = min(max(cap // 16, MIB), 32 * MIB)
        self.ballast: Final = min(cap // 32 // BLOCK * BLOCK, MIB)
        self._numbers = AccountNumbers(cap, 0, 0, 0, 0)
        self._lock = threading.Lock()

    @property
    def numbers(self) -> AccountNumbers:
        """The current reading."""
        return self._numbers

    def fits_ever(self, nbytes: int) -> bool:
        """Whether `nbytes` would fit if every blob went."""
        now = self._numbers
        return nbytes <= now.cap - self.headroom - now.index - now.overhead

    def shortfall(self, nbytes: int = 0) -> int:
        """Bytes to free before `nbytes` more fit; 0 or less if they fit now."""
        now = self._numbers
        return now.reserved + nbytes - (now.cap - self.headroom)

    def take(self, nbytes: int) -> bool:
        """Hold `nbytes`, if they fit."""
        with self._lock:
            if self.shortfall(nbytes) > 0:
                return False
            self._change(held=nbytes)
            return True

    def change(
        self, *, blobs: int = 0, index: int = 0, overhead: int = 0, held: int = 0
    ) -> None:
        """Add differences, all at once."""
        with self._lock:
            self._change(blobs, index, overhead, held)

    def measured(
        self, *, index: int | None = None, overhead: int | None = None
    ) -> None:
        """Replace parts by what was measured."""
        with self._lock:
            now = self._numbers
            self._numbers = attrs.evolve(
                now,
                index=now.index if index is None else index,
                overhead=now.overhead if overhead is None else overhead,
            )

    def _change(
        self, blobs: int = 0, index: int = 0, overhead: int = 0, held: int = 0
    ) -> None:
        now = self._numbers
        self._numbers = AccountNumbers(
            now.cap,
            now.blobs + blobs,
            now.index + index,
            now.overhead + overhead,
            now.held + held,
        )


class Reservation:
    """Bytes held for what is about to be written; give back with `release`."""

    def __init__(self, account: Account, nbytes: int) -> None:
        self._account = account
        self._lock = threading.Lock()
        self._remaining = nbytes

    @property
    def remaining(self) -> int:
        """Bytes still held."""
        return self._remaining

    def spend(self, blobs: int) -> None:
        """Turn held bytes into blobs, which stay on the account as such."""
        with self._lock:
            spent = min(blobs, self._remaining)
            self._remaining -= spent
            self._account.change(blobs=blobs, held=-spent)

    def absorb(self, other: "Reservation") -> None:
        """Take over what another holds."""
        with self._lock:
            self._remaining += other.give_up()

    def give_up(self) -> int:
        """Hand the rest to someone who keeps it on the account."""
        with self._lock:
            rest, self._remaining = self._remaining, 0
            return rest

    def release(self) -> None:
        """Give the rest back; once is enough, twice does no harm."""
        self._account.change(held=-self.give_up())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
