"""The cache's account: reserved bytes are never below what the disk holds.

In: reservations before anything is written, and measurements after. Out: whether a
reservation fits, and the numbers. All numbers are allocated bytes over everything
below the root:

* `blobs`: files that have a row;
* `index`: SQLite's database and log;
* `overhead`: directories, and the root's other files, the ballast among them;
* `held`: reservations, under which blobs, rows and staged files come to be.

The cap as of now is smaller where the volume must keep bytes free: what is ours and
what is free, without that floor. Blobs and rows may fill it up to `headroom`. That rest
is for what cannot wait for room, since it makes room: the log of transactions that
remove nodes, checkpoints.
"""

import threading
from types import TracebackType
from typing import Final, Self

import attrs

from kvport.manifest.limits import MIB
from kvport.snapshot.errors import CapError

BLOCK: Final = 4096
"""Unit of allocation that is reckoned with, and SQLite's page size."""
NODE_BYTES: Final = 8 * BLOCK
"""Index growth to reserve for a new node: pages in the log, then in the database."""
MIN_CAP: Final = 4 * MIB


def whole_blocks(size: int) -> int:
    """Bytes that the content of a file of `size` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def allocation_bound(size: int) -> int:
    """Bytes that a new file of `size` bytes takes at most, with its directory entry."""
    return whole_blocks(size) + 2 * BLOCK


def headroom_of(cap: int) -> int:
    """Bytes of a cap that are kept for what makes room."""
    return min(max(cap // 16, MIB), 32 * MIB)


def ballast_of(cap: int) -> int:
    """Bytes of the ballast under a cap."""
    return min(cap // 32 // BLOCK * BLOCK, MIB)


def check_cap(cap: int) -> None:
    """See that a cap is large enough to hold anything.

    Raises:
        CapError: it is not.
    """
    if cap < MIN_CAP:
        raise CapError(f"a cap below {MIN_CAP // MIB} MiB holds no state")


@attrs.frozen
class AccountNumbers:
    """One consistent reading, in bytes.

    Attributes:
        cap: hard limit; under `auto` it follows the volume.
        effective: the cap as of now; smaller where the floor leaves less.
        floor: free bytes that the volume keeps; 0 if no one watches.
        free: what the volume had left at the last look; 0 before the first.
        blobs: see the module.
        index: likewise.
        overhead: likewise.
        held: likewise.
    """

    cap: int
    effective: int
    floor: int = 0
    free: int = 0
    blobs: int = 0
    index: int = 0
    overhead: int = 0
    held: int = 0

    @property
    def reserved(self) -> int:
        """The sum that stays between real use and the cap."""
        return self.blobs + self.index + self.overhead + self.held

    def under(self, cap: int) -> int:
        """What would be the cap as of now under this one."""
        if not self.floor:
            return cap
        ours = self.blobs + self.index + self.overhead
        return max(0, min(cap, ours + self.free - self.floor))

    def to_evict(self, headroom: int) -> int:
        """Bytes that eviction should free; 0 if all is well, or cannot be so by it.

        Overhead does not go with state. Where it leaves no room for any, state goes
        for the cap itself, and where it is beyond that, none: it would go in vain.

        Args:
            headroom: of the cap.
        """
        if self.overhead < self.cap - headroom:
            return max(0, self.reserved - (self.effective - headroom))
        beyond = self.reserved - self.cap if self.overhead < self.cap else 0
        below = self.floor - self.free if self.floor else 0
        return max(0, beyond, below)

    @property
    def used_percent(self) -> float:
        """How much of the cap as of now is reserved: 0 to 100, whatever happens."""
        if self.reserved >= self.effective:
            return 100.0
        return max(0.0, 100 * self.reserved / self.effective)


class Account:
    """Thread-safe; see the module."""

    def __init__(self, cap: int) -> None:
        check_cap(cap)
        self.headroom: Final = headroom_of(cap)
        self.ballast: Final = ballast_of(cap)
        self._numbers = AccountNumbers(cap, cap)
        self._lock = threading.Lock()

    @property
    def numbers(self) -> AccountNumbers:
        """The current reading."""
        return self._numbers

    @property
    def usable(self) -> int:
        """Bytes that blobs and reservations may take together; may be below 0."""
        now = self._numbers
        return now.effective - self.headroom - now.index - now.overhead

    def shortfall(self, nbytes: int = 0) -> int:
        """Bytes to free before `nbytes` more fit; 0 or less if they fit now."""
        now = self._numbers
        return now.reserved + nbytes - (now.effective - self.headroom)

    def take(self, nbytes: int) -> bool:
        """Hold `nbytes`, if they fit."""
        with self._lock:
            if self.shortfall(nbytes) > 0:
                return False
            self._change(held=nbytes)
            return True

    def take_headroom(self, nbytes: int) -> bool:
        """Hold a few bytes for what cannot wait, if the cap itself has them."""
        with self._lock:
            now = self._numbers
            if now.reserved + nbytes > now.cap:
                return False
            self._change(held=nbytes)
            return True

    def observed(self, *, cap: int, floor: int, free: int, staged: int) -> None:
        """Take in what the volume says; to be called while nothing is written.

        Args:
            cap: hard limit from now on.
            floor: free bytes that must stay; 0 for no such limit.
            free: free bytes.
            staged: bytes of held ones that are on the disk already.
        """
        with self._lock:
            now = self._numbers
            now = attrs.evolve(now, cap=cap, floor=floor, free=free)
            # What is staged is ours too, and held.
            effective = attrs.evolve(now, blobs=now.blobs + staged).under(cap)
            self._numbers = attrs.evolve(now, effective=effective)

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
        self._numbers = attrs.evolve(
            now,
            blobs=now.blobs + blobs,
            index=now.index + index,
            overhead=now.overhead + overhead,
            held=now.held + held,
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
