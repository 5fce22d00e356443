"""The writer: one thread that stores what chains append, in order.

In: items of chains, bounded in bytes. Out: batches for `store.Store`: what is queued,
up to `BATCH_BYTES`. No error ends the thread; a batch that meets a defect of ours
breaks its chains, like one that meets a full disk.
"""

import threading
import traceback
from collections import deque
from typing import Final

import structlog

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.chain import Item
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.cache.store import Store

QUEUE_BYTES: Final = 256 * MIB
"""Blobs that wait or are being written; beyond it `append` blocks."""
BATCH_BYTES: Final = 64 * MIB

_log = structlog.get_logger(__name__)


class Writer:
    """The thread and its queue."""

    def __init__(self, store: Store, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self._store = store
        self._queue_bytes = queue_bytes
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._nbytes = 0
        self._put_count = 0
        self._done_count = 0
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="kvport-cache-writer", daemon=True
        )
        self._thread.start()

    def put(self, item: Item) -> bool:
        """Queue an item, waiting for room; an oversized one passes once it is alone.

        False once the writer is closing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or not self._nbytes
                    or self._nbytes + item.nbytes <= self._queue_bytes
                )
            )
            if self._closing:
                return False
            self._queue.append(item)
            self._nbytes += item.nbytes
            self._put_count += 1
            self._changed.notify_all()
            return True

    def flush(self) -> None:
        """Wait until all that is queued now is durable and visible, or was skipped."""
        with self._changed:
            target = self._put_count
            self._changed.wait_for(lambda: self._done_count >= target)

    def close(self) -> None:
        """Store what is queued, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        # A call per batch, so that its buffers are let go before the next wait.
        while self._step():
            pass

    def _step(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch = self._take()
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
            self._nbytes -= sum(item.nbytes for item in batch)
            self._done_count += len(batch)
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
