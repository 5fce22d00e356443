"""The room that the volume leaves: keeps the account's cap true to it.

In: a cap or none, a floor of free bytes or none, the volume's word. Out: the cap as of
now, on the account. Others fill the disk too: each reservation looks, at most every
`_FRESH` seconds. A look needs the cache's changes: what is ours must not be on its way
while it is compared with what is free.

Snapshots may keep the room of what is removed. Whoever removes for the floor says what
came of it; when that was in vain, nothing is removed for it for a while, ever longer.
"""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs
import structlog

from kvport.manifest.limits import GIB
from kvport.snapshot.cache.account import (
    MIN_CAP,
    Account,
    AccountNumbers,
    check_cap,
)
from kvport.snapshot.cache.files import Files
from kvport.snapshot.units import format_bytes

AUTO: Final = "auto"
Limit: TypeAlias = int | Literal["auto"] | None
"""In bytes, by what is usual for the volume, or None for the one there is."""
_FRESH: Final = 0.25
_FLOOR: Final = 10 * GIB
_SHARE: Final = 20
"""The floor is the larger of `_FLOOR` and one `_SHARE`th of the volume."""
_PAUSE: Final = 10.0
_LONGEST_PAUSE: Final = 3600.0

_log = structlog.get_logger(__name__)


@attrs.frozen
class VolumeSpace:
    """What a volume says, in bytes."""

    total: int
    free: int

    @classmethod
    def of(cls, path: Path) -> "VolumeSpace | None":
        """Of the volume of a path; None if it does not say."""
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def floor(self, wanted: int | None) -> int:
        """Free bytes that are to stay: as wanted, None for what is usual."""
        return max(_FLOOR, self.total // _SHARE) if wanted is None else wanted


@attrs.frozen
class Full:
    """Why nothing can be stored, and since when, in UTC."""

    reason: str
    since: datetime

    @classmethod
    def now(cls, what: str, before: "Full | None") -> "Full":
        """From now on, or since when it was already."""
        reason = f"{what}: what was stored can be restored"
        return cls(reason, before.since if before else datetime.now(UTC))


def automatic_cap(space: VolumeSpace | None, ours: int) -> int:
    """Half of what is free and ours, and enough to work with."""
    return max(MIN_CAP, ((space.free if space else 0) + ours) // 2)


class Room:
    """Of one open root; see the module.

    Attributes:
        full: while the limits leave no state any room.
    """

    def __init__(
        self, files: Files, account: Account, cap: int | None, floor: int | None
    ) -> None:
        self._files: Final = files
        self._account: Final = account
        self._cap: Final = cap
        self._floor: Final = floor
        self._looked = -_FRESH
        self._paused_until = 0.0
        self._pause = _PAUSE
        self._total = 0
        self.full: Full | None = None

    def look(self, *, now: bool = False) -> None:
        """Take in what the volume says, unless that is fresh; the changes are held.

        Args:
            now: in any case, and let an automatic cap follow.

        Raises:
            StorageError: the root is not there.
        """
        moment = time.monotonic()
        if not now and moment - self._looked < _FRESH:
            return
        self._looked = moment
        # Else it is what it was mounted on that would answer.
        self._files.check_root()
        if (space := VolumeSpace.of(self._files.root)) is None:
            return
        self._total = space.total
        numbers = self._account.numbers
        ours = numbers.blobs + numbers.index + numbers.overhead
        floor = space.floor(self._floor)
        staged = 0
        if floor or self._cap is None:
            staged = self._files.staged_bytes()
        cap = numbers.cap
        if now and self._cap is None:
            cap = automatic_cap(space, ours + staged)
        self._account.observed(cap=cap, floor=floor, free=space.free, staged=staged)
        self._warn()

    def supposed(self, cap: Limit, floor: Limit) -> AccountNumbers:
        """What the account would say with other limits, as of the last look.

        Raises:
            CapacityError: the cap is too small to hold anything.
        """
        now = self._account.numbers
        space = VolumeSpace.of(self._files.root)
        if cap == AUTO:
            cap = automatic_cap(space, now.blobs + now.index + now.overhead)
        if cap is None:
            cap = now.cap
        else:
            check_cap(cap)
        if floor == AUTO:
            floor = space.floor(None) if space else 0
        now = attrs.evolve(now, cap=cap, floor=now.floor if floor is None else floor)
        return attrs.evolve(now, effective=now.under(cap))

    @property
    def paused(self) -> bool:
        """Whether nothing is to be removed for the floor."""
        numbers = self._account.numbers
        return numbers.effective < numbers.cap and time.monotonic() < self._paused_until

    def removed(self, nbytes: int, before: int) -> None:
        """Say how many bytes were removed, and what was free before."""
        numbers = self._account.numbers
        if numbers.effective >= numbers.cap or not nbytes:
            return
        space = VolumeSpace.of(self._files.root)
        if space is None or space.free - before >= nbytes // 2:
            self._pause = _PAUSE
            return
        _log.warning("cache_removed_in_vain", nbytes=nbytes, pause=self._pause)
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def refusal(self, before: Full | None, nbytes: int = 0) -> Full:
        """What leaves no room, where something found none.

        Args:
            before: what was said about it before.
            nbytes: so many bytes found no room; 0 if none would.
        """
        more = f"{format_bytes(nbytes)} more" if nbytes else "more"
        return Full.now(f"{self._limit()} no room for {more}", before)

    def _limit(self) -> str:
        """What it is that leaves no room."""
        numbers = self._account.numbers
        usable, foreign = self._account.usable, self._files.foreign_bytes
        if usable <= 0 < usable + foreign:
            return (
                f"{format_bytes(foreign)} of files in the cache's directory that are"
                " not its own (`kvport cache gc` removes them) leave"
            )
        if numbers.overhead >= numbers.cap - self._account.headroom:
            return "the cache's own directories leave"
        floor, total = format_bytes(numbers.floor), format_bytes(self._total)
        if numbers.effective >= numbers.cap:
            spared = format_bytes(self._account.headroom)
            return f"beside the {spared} that removals need the cap leaves"
        if numbers.floor >= self._total:
            return (
                f"the volume has {total} in all, less than the {floor} that are to stay"
                " free on it, and so needs a smaller --free-floor; as it is there is"
            )
        return (
            f"{floor} of the volume's {total} are to stay free (--free-floor), which"
            " leaves"
        )

    def _warn(self) -> None:
        numbers = self._account.numbers
        if self._account.usable > 0:
            self.full = None
            return
        if self.full is None:
            _log.warning(
                "cache_without_room",
                reason=self.refusal(None).reason,
                free=numbers.free,
                floor=numbers.floor,
                volume=self._total,
            )
        self.full = self.refusal(self.full)
