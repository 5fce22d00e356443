"""Maintenance: what a cache does from time to time without being asked.

In: one call to make. Out: it is made every few seconds, on a thread of its own, until
`stop`. No error ends the thread: what failed is tried again next time.
"""

import threading
import traceback
from collections.abc import Callable
from typing import Final

import structlog

from kvport.manifest.errors import KvportError

EVERY: Final = 5.0
"""Seconds."""

_log = structlog.get_logger(__name__)


class Maintenance:
    """The thread."""

    def __init__(self, tick: Callable[[], None], every: float | None) -> None:
        """Start it; `every` so many seconds, never if None."""
        self._tick: Final = tick
        self._every: Final = every
        self._stopped: Final = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="kvport-cache-maintenance", daemon=True
        )
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread, after what it is doing; again does nothing.

        Args:
            seconds: to wait for it; on a volume that hangs it ends when that lets go.
        """
        self._stopped.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                self._tick()
            except KvportError as error:
                _log.warning("cache_maintenance_failed", reason=error.code)
            except Exception as error:  # noqa: BLE001 - the thread outlives any defect
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{frame.name}:{frame.lineno}"
                kind = type(error).__name__
                _log.error("cache_maintenance_defect", error=kind, where=where)
