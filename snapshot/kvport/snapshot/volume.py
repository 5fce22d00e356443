"""The volume that the cache is on: whether it is there, and the cache while it is.

In: how the root is opened, and what is to be done on each opened cache. Out: the cache,
or an error that says why there is none; and a status for operators.

* A monitor looks every second, and at once when something failed: whether the path
  leads to the directory that was claimed, whether that is the root it was, and whether
  it can be written.
* A volume that is lost costs what was queued for it, which is counted, and nothing
  else: requests go on without the cache.
* What comes back is opened as at a start: swept, within its cap, and only if it is the
  root that was known. A root that is missing is not made again, one that took its place
  is not touched.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, Self

import attrs
import structlog

from kvport.manifest.errors import KvportError
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.root import identify
from kvport.snapshot.cache.schema import storage_errors
from kvport.snapshot.errors import (
    CacheAbsentError,
    CacheInUseError,
    CapacityError,
    DiskFullError,
    ForeignRootError,
    MissingRootError,
    StorageError,
)
from kvport.snapshot.volume_status import (
    PATIENCE,
    VolumeState,
    VolumeStatus,
    check_writable,
    look,
    state_of,
)

__all__ = ["Volume", "VolumeState", "VolumeStatus"]

INTERVAL: Final = 1.0
"""Seconds between two looks at the volume."""
_LONGEST_PAUSE: Final = 60
"""Intervals between two attempts to open what fails, or is full, at most."""

_log = structlog.get_logger(__name__)

Work = Callable[[Cache], object]
"""Something to be done on a cache; to do it twice is to do it once."""


class Volume:
    """The cache of one place, while there is one. Thread-safe."""

    def __init__(self, opening: Opening | None, interval: float) -> None:
        if opening is not None:
            opening = attrs.evolve(opening, on_failed=self.suspect)
        self._opening = opening
        self._interval: Final = interval
        self._lock = threading.RLock()
        self._works: list[Work] = []
        self._cache: Cache | None = None
        self._status = VolumeStatus(
            VolumeState.OFF, "the cache is switched off", _now()
        )
        self._retry_at = 0.0
        self._failures = 0
        self._suspected = False
        self._closing = False
        self._wake = threading.Event()
        self._monitor: threading.Thread | None = None

    @classmethod
    def open(
        cls, opening: Opening, works: Sequence[Work] = (), interval: float = INTERVAL
    ) -> Self:
        """Open the cache, or go on without it while its volume is the reason.

        Args:
            opening: where it is, and how it is opened, each time.
            works: as of `arrange`.
            interval: seconds between two looks at the volume.

        Raises:
            MissingRootError: no cache was ever there, nor is there a place for one.
            ForeignRootError: the directory is no cache of this format.
            CacheInUseError: another process serves from it.
            CapacityError: the cap is too small to hold anything.
        """
        volume = cls(opening, interval)
        volume._works.extend(works)
        error = volume._open_error()
        known = opening.expected_root is not None
        never_was = isinstance(error, MissingRootError) and not known
        fatal = isinstance(error, ForeignRootError | CacheInUseError | CapacityError)
        if error is not None and (fatal or never_was):
            raise error
        if error is not None:
            volume._set(error)
        volume._monitor = threading.Thread(
            target=volume._watch, name="kvport-cache-volume", daemon=True
        )
        volume._monitor.start()
        return volume

    @classmethod
    def holding(cls, cache: Cache) -> Self:
        """A volume of a cache that the caller opens, watches over and closes."""
        volume = cls(None, INTERVAL)
        volume._cache = cache
        volume._status = VolumeStatus(VolumeState.OK, "", _now())
        return volume

    @classmethod
    def off(cls) -> Self:
        """A volume that never has a cache."""
        return cls(None, INTERVAL)

    def close(self, progress: Callable[[int], None] | None = None) -> None:
        """End the monitor, and close the cache: see `Cache.close`."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._monitor is not None:
            self._monitor.join(PATIENCE)
        with self._lock:
            cache, self._cache = self._cache, None
        if cache is not None and self._opening is not None:
            cache.close(progress)

    @property
    def cache(self) -> Cache:
        """The open cache; to be asked for anew by each piece of work.

        Raises:
            CacheAbsentError: there is none; the message says why.
        """
        with self._lock:
            if self._cache is None:
                raise CacheAbsentError(self._status.reason or "the cache was closed")
            return self._cache

    @property
    def status(self) -> VolumeStatus:
        """How it is, as of the last look."""
        with self._lock:
            if self._cache is not None and (full := self._cache.full):
                return VolumeStatus(VolumeState.FULL, full.reason, full.since)
            return self._status

    @contextlib.contextmanager
    def using(self) -> Iterator[Cache]:
        """The cache, for a piece of work that cannot do without.

        Raises:
            CacheAbsentError: there is none, or it went away meanwhile.
        """
        cache = self.cache
        try:
            yield cache
        except StorageError:
            self.suspect()
            cache.check()
            raise

    def suspect(self) -> None:
        """Something failed: look at the volume now, and closely."""
        self._suspected = True
        self._wake.set()

    def arrange(self, work: Work) -> Callable[[], None]:
        """Have something done on the open cache, and on each that is opened later.

        What fails for the volume's sake is done when it is opened again.

        Args:
            work: short.

        Returns:
            What ends the arrangement.

        Raises:
            CapacityError: the open cache has no room for it; it is not arranged.
        """
        with self._lock:
            self._works.append(work)
            cache = self._cache
        try:
            if cache is not None:
                work(cache)
        except (DiskFullError, StorageError) as error:
            self._lose(cache, error)
        except BaseException:
            self._works.remove(work)
            raise

        def end() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._works.remove(work)

        return end

    # The monitor.

    def _watch(self) -> None:
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            if self._closing:
                return
            try:
                self._look()
            except Exception:  # noqa: BLE001 - the monitor outlives any defect
                _log.exception("cache_monitor_defect")

    def _look(self) -> None:
        closely, self._suspected = self._suspected, False
        if (cache := self._cache) is None:
            if time.monotonic() >= self._retry_at:
                self._try_to_open()
        elif self._opening is not None:
            error = look(cache, self._opening.root, closely=closely)
            if error is not None:
                self._lose(cache, error)

    def _lose(self, cache: Cache | None, error: KvportError) -> None:
        with self._lock:
            if cache is None or self._cache is not cache:
                return
            self._cache = None
            self._set(error)
        cache.abandon()

    def _try_to_open(self) -> None:
        """Open the cache, if it is there; else say why it is not."""
        if (error := self._open_error()) is not None:
            self._set(error)

    def _open_error(self) -> KvportError | None:
        """Open the cache, or answer why it could not be."""
        try:
            with storage_io(), storage_errors():
                self._open()
        except KvportError as error:
            return error
        return None

    def _open(self) -> None:
        opening = self._opening
        if opening is None:
            return
        if opening.expected_root is not None:
            identify(opening.root, opening.expected_root)
        if opening.root.is_dir():
            check_writable(opening.root)
        cache = Cache.open(opening)
        with contextlib.ExitStack() as undo:
            undo.callback(cache.abandon)
            done: list[Work] = []
            while (work := self._publish(cache, done)) is not None:
                work(cache)
                done.append(work)
            undo.pop_all()
        self._opening = attrs.evolve(opening, expected_root=cache.root_id)

    def _publish(self, cache: Cache, done: Sequence[Work]) -> Work | None:
        """Let the cache be used, once all works are done on it; else the next one."""
        with self._lock:
            if self._closing:
                raise CacheAbsentError("the cache was closed")
            for work in self._works:
                if work not in done:
                    return work
            self._cache = cache
            self._failures = 0
            came_back = self._status.state is not VolumeState.OFF
            self._status = VolumeStatus(VolumeState.OK, "", _now())
        if came_back:
            _log.info("cache_is_back")
        return None

    def _set(self, error: KvportError) -> None:
        """Say why there is no cache, once; look for it less often if it fails."""
        state = state_of(error)
        with self._lock:
            before = self._status
            if (before.state, before.reason) != (state, error.message):
                self._failures = 0
                self._status = VolumeStatus(state, error.message, _now())
                root = None if self._opening is None else str(self._opening.root)
                _log.warning(
                    "cache_lost", state=state.value, reason=error.message, root=root
                )
            if state in {VolumeState.FAILED, VolumeState.FULL}:
                pause = min(1 << self._failures, _LONGEST_PAUSE) * self._interval
                self._failures = min(self._failures + 1, 16)
                self._retry_at = time.monotonic() + pause
            else:
                self._retry_at = 0.0


def _now() -> datetime:
    return datetime.now(UTC)
