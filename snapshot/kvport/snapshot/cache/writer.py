"""The writer: one thread that stores what chains append, in order.

In: items of chains, bounded in bytes. Out: batches for `store.Store`: what is queued,
up to `BATCH_BYTES`. No error ends the thread; a batch that meets a defect of ours
breaks its chains, like one that meets a full disk.

The end waits for the volume as long as it gets on: `PATIENCE` seconds a batch, and
what its bytes take at `FLOOR_RATE`. What is left then is dropped and counted. Nobody
waits for a volume that hangs: the thread is a daemon, and closes the index itself.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.chain import Item
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.cache.store import Store
from kvport.snapshot.errors import CacheAbsentError

QUEUE_BYTES: Final = 256 * MIB
"""Blobs that wait or are being written; beyond it `append` blocks."""
BATCH_BYTES: Final = 64 * MIB
PATIENCE: Final = 30.0
"""Seconds without a finished batch, beside the time that its bytes take."""
FLOOR_RATE: Final = 5 * MIB
"""Bytes a second that any volume in order writes."""
_TICK: Final = 1.0
"""Seconds between two words on how far the end is."""

_log = structlog.get_logger(__name__)


def _nothing() -> None:
    """What is done last, unless there is something to do."""


class Writer:
    """The thread and its queue."""

    def __init__(
        self,
        store: Store,
        *,
        queue_bytes: int = QUEUE_BYTES,
        patience: float = PATIENCE,
    ) -> None:
        self._store = store
        self._queue_bytes = queue_bytes
        self._patience = patience
        self._queue: deque[Item] = deque()
        self._writing: list[Item] = []
        self._since = time.monotonic()
        self._changed = threading.Condition()
        self._nbytes = 0
        self._put_count = 0
        self._done_count = 0
        self._refusal: SkipReason | None = None
        self._given_up = False
        self._ended = False
        self._last: Callable[[], None] = _nothing
        self._thread = threading.Thread(
            target=self._run, name="kvport-cache-writer", daemon=True
        )
        self._thread.start()

    def put(self, item: Item) -> SkipReason | None:
        """Queue an item, waiting for room; an oversized one passes once it is alone.

        Why it is refused, once the writer is closing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._refusal is not None
                    or not self._nbytes
                    or self._nbytes + item.nbytes <= self._queue_bytes
                )
            )
            if self._refusal is None:
                self._queue.append(item)
                self._nbytes += item.nbytes
                self._put_count += 1
                self._changed.notify_all()
            return self._refusal

    def flush(self) -> None:
        """Wait until all that is queued now is durable and visible, or was skipped.

        Raises:
            CacheAbsentError: the queue was given up.
        """
        with self._changed:
            target = self._put_count
            self._changed.wait_for(lambda: self._given_up or self._done_count >= target)
            if self._given_up:
                raise CacheAbsentError("the cache was closed")

    @property
    def stalled(self) -> bool:
        """Whether a batch takes longer than on any volume that is in order."""
        with self._changed:
            return bool(self._writing) and self._is_late()

    def close(
        self,
        last: Callable[[], None] = _nothing,
        progress: Callable[[int], None] | None = None,
    ) -> bool:
        """Store what is queued, do what is to be done last, and end the thread.

        Args:
            last: called in the thread, once nothing is stored any more.
            progress: told about once a second how many bytes are left; else it is
                logged.

        Returns:
            False if the volume did not get on: what was left is dropped, and `last` is
            called once it does, if ever.
        """
        tell = progress or _log_progress
        with self._changed:
            self._end(SkipReason.CLOSED, last)
            self._since = time.monotonic()
        while True:
            with self._changed:
                tick = min(_TICK, self._patience)
                if self._changed.wait_for(lambda: self._ended, tick):
                    break
                if self._is_late():
                    self._give_up(SkipReason.DEADLINE, [*self._writing, *self._queue])
                    return False
                left = self._nbytes
            if left:
                tell(left)
        self._thread.join()
        return True

    def abandon(self, last: Callable[[], None], seconds: float) -> bool:
        """Drop what is queued, as the volume is gone, and end the thread.

        Args:
            last: as of `close`.
            seconds: to wait for the thread.

        Returns:
            Whether the thread has ended; else it does when the volume lets it.
        """
        with self._changed:
            self._end(SkipReason.ABSENT, last)
            self._give_up(SkipReason.ABSENT, self._queue)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _end(self, refusal: SkipReason, last: Callable[[], None]) -> None:
        self._refusal, self._last = refusal, last
        self._changed.notify_all()

    def _is_late(self) -> bool:
        took = sum(item.nbytes for item in self._writing) / FLOOR_RATE
        return time.monotonic() - self._since > self._patience + took

    def _give_up(self, reason: SkipReason, items: list[Item] | deque[Item]) -> None:
        """Count what is lost, all in one line of the log; wake who waits for it."""
        lost = [item for item in items if item.segment is not None]
        self._nbytes -= sum(item.nbytes for item in self._queue)
        self._done_count += len(self._queue)
        self._given_up = True
        for item in lost:
            item.chain.lose(reason)
        if lost:
            _log.warning(
                "cache_queue_dropped",
                reason=reason.value,
                segments=len(lost),
                nbytes=sum(item.nbytes for item in lost),
            )
        self._queue.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        # A call per batch, so that its buffers are let go before the next wait.
        while self._step():
            pass
        try:
            self._last()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _step(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._refusal is not None)
            batch = self._writing = self._take()
            self._since = time.monotonic()
        if not batch:
            return False
        try:
            self._store.store(batch)
        except Exception as error:  # noqa: BLE001 - the thread outlives any defect
            # Where, but no message or locals: they might hold keys.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.name}:{frame.lineno}"
            kind = type(error).__name__
            _log.error("cache_writer_defect", error=kind, where=where)
            for item in batch:
                if item.segment is not None:
                    item.chain.skip(SkipReason.INTERNAL, item.segment.start)
        with self._changed:
            self._writing = []
            self._since = time.monotonic()
            self._nbytes -= sum(item.nbytes for item in batch)
            self._done_count += len(batch)
            batch.clear()  # whoever waits shall find the buffers free
            self._changed.notify_all()
        return True

    def _take(self) -> list[Item]:
        """What is queued, up to `BATCH_BYTES`, and one item at least if there is."""
        batch: list[Item] = []
        total = 0
        while self._queue:
            total += self._queue[0].nbytes
            if batch and total > BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch


def _log_progress(nbytes: int) -> None:
    _log.info("cache_closing", bytes_left=nbytes)
