"""Scrubbing in the background: one run at a time, started and stopped by an operator.

In: the open cache, and a rate. Out: a thread that reads what is stored, and progress.
Where it stopped is kept in the index, so that a new rate, and a new process, go on from
there.
"""

import threading
from collections.abc import Callable
from typing import Final

import attrs
import structlog

from kvport.manifest.errors import KvportError
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.scrub import ScrubProgress

_log = structlog.get_logger(__name__)


class Scrubbing:
    """Of one home's cache; thread-safe."""

    def __init__(self, cache: Callable[[], Cache]) -> None:
        """Nothing runs yet; `cache` gives the open cache, or an error."""
        self._cache: Final = cache
        self._lock: Final = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def progress(self) -> ScrubProgress:
        """How far it is.

        Raises:
            StorageError: there is no cache, or its index could not be read.
        """
        # A thread that was just started, or has just ended, counts as it is.
        running = self._thread is not None and self._thread.is_alive()
        progress = self._cache().scrub.progress
        return attrs.evolve(progress, running=running)

    def start(self, rate: int | None) -> None:
        """Read on from where the last run stopped; one under way takes the new rate.

        Args:
            rate: bytes per second; None for as fast as it goes.

        Raises:
            StorageError: there is no cache.
        """
        with self._lock:
            scrub = self._cache().scrub
            self._end()
            scrub.begin()
            stop = self._stop = threading.Event()

            def run() -> None:
                try:
                    scrub.run(rate, stop)
                except KvportError as error:
                    _log.warning("cache_scrub_failed", reason=error.code)

            self._thread = threading.Thread(target=run, name="kvport-cache-scrub")
            self._thread.start()

    def stop(self) -> None:
        """Stop after what is being read; again does nothing."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
