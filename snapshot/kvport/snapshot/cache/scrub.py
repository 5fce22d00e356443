"""Scrubbing: read everything that is stored, slowly, before someone needs it.

In: a rate, and an event that stops it. Out: damage found, counted and removed. Blobs
are held to their digests, the rows of the nodes that own them to their MACs. Files are
read in the order of their rows; where it stopped is kept in the index, and the next
run goes on from there, after a restart too. Each file is read in one go, and waited for
afterwards: what is removed meanwhile is not kept on the disk by an open file.

No lock is held while a file is read: stores, removals and lookups go on.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import attrs
import structlog
from blake3 import blake3

from kvport.manifest.digests import BlobDigest
from kvport.manifest.identity import StateIdentity
from kvport.manifest.limits import MIB
from kvport.snapshot.cache.blob_stream import BlobStream, UnfitFileError, read_some
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.lookup import Lookup
from kvport.snapshot.cache.reader import Reader
from kvport.snapshot.cache.records import BlobRef, Namespace, RemovalReason
from kvport.snapshot.cache.schema import class_of
from kvport.snapshot.errors import DiskFullError, GoneError, StorageError

_SOME: Final = 64
"""Rows fetched at a time."""
_SECONDS: Final = 10.0
"""After which it is stored how far it is: what a crash costs at most."""
_CHUNK: Final = MIB

_ROWS: Final = """
SELECT n, ns, coalesce((SELECT min(class) FROM blob WHERE file = file.n), 0),
    digest, size, trailer
FROM file WHERE n > ? AND n <= ? AND live ORDER BY n LIMIT ?"""
_OWNERS: Final = "SELECT node FROM blob WHERE file = ?"
_COUNT: Final = "SELECT count(*), max(n) FROM file WHERE n > ? AND live"

_log = structlog.get_logger(__name__)


@attrs.frozen
class ScrubProgress:
    """How far a scrub is.

    Attributes:
        running: whether one is under way.
        checked: files that this run has read so far, or the last one had; a run that
            was stopped goes on, but counts anew after a restart.
        nbytes: bytes of them.
        damaged: how many of them were not what was stored, or not there.
        tampered: nodes that own such files, and whose rows were not written here.
        remaining: files that this run still has to read, at most; removals make them
            fewer. 0 once it has read all, whatever was stored since.
        completed: when a run had read all for the last time, in seconds of the epoch;
            None if that never was.
    """

    running: bool = False
    checked: int = 0
    nbytes: int = 0
    damaged: int = 0
    tampered: int = 0
    remaining: int = 0
    completed: int | None = None


class Scrub:
    """Of one open cache; `progress` may be read by any thread."""

    def __init__(
        self,
        index: Index,
        files: Files,
        reader: Reader,
        lookup: Lookup,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._files = files
        self._reader = reader
        self._lookup = lookup
        self._clock = clock
        self._running = threading.Lock()
        self._namespaces: dict[int, Namespace] = {}
        self._progress = ScrubProgress()

    @property
    def progress(self) -> ScrubProgress:
        """The current reading.

        Raises:
            StorageError: the index could not be read.
        """
        now = self._progress
        if now.running:
            return now
        done, completed = self._stored()
        # At the first row again all was read, unless nothing ever was.
        remaining = self._ahead(done)[0] if done or completed is None else 0
        return attrs.evolve(now, remaining=remaining, completed=completed)

    def begin(self) -> None:
        """Say that a run is about to begin, before its thread does: see `run`.

        Raises:
            StorageError: the index could not be read.
        """
        done, completed = self._stored()
        before = self._progress if done else ScrubProgress()
        self._progress = attrs.evolve(
            before,
            running=True,
            remaining=self._ahead(done)[0],
            completed=completed,
        )

    def run(self, rate: int | None, stop: threading.Event) -> None:
        """Read from where the last run stopped to the end, or until `stop` is set.

        What is stored meanwhile is left to the next run. Does nothing while another
        run is under way.

        Args:
            rate: bytes per second, on average over files; None for no limit.
            stop: looked at before each mebibyte, and while waiting.

        Raises:
            ValueError: the rate is below 1.
            CacheAbsentError: the root is not there.
            StorageError: the volume refused; the next run begins at this file.
        """
        if rate is not None and rate < 1:
            raise ValueError("a rate must be at least one byte per second")
        if not self._running.acquire(blocking=False):
            return
        try:
            self._run(rate, stop)
        finally:
            self._progress = attrs.evolve(self._progress, running=False)
            self._running.release()

    def _run(self, rate: int | None, stop: threading.Event) -> None:
        self.begin()
        stored, completed = self._stored()
        done = stored
        _, end = self._ahead(done)
        due = stored_at = self._clock()
        try:
            for n, ns, ref in self._files_between(done, end):
                if stop.is_set():
                    return
                # Rows first: a planted one may speak of a file that is not its own.
                tampered = self._remove_tampered(n, ns)
                is_damaged = self._is_damaged(ns, ref, stop)
                if is_damaged is None:
                    return
                done = n
                self._count(ref.size, tampered, is_damaged=is_damaged)
                if rate is not None:
                    # Time that was lost, as asleep, is not made up for.
                    due = max(due, self._clock()) + ref.size / rate
                    stop.wait(max(0.0, due - self._clock()))
                if self._clock() - stored_at >= _SECONDS:
                    self._store(done)
                    stored, stored_at = done, self._clock()
            done, completed = 0, int(time.time())
            self._progress = attrs.evolve(
                self._progress, remaining=0, completed=completed
            )
            self._store(done, completed)
            stored = done
        finally:
            if done != stored:
                self._store(done)

    def _files_between(self, done: int, end: int) -> Iterator[tuple[int, int, BlobRef]]:
        """Row, namespace's row and blob of each file that is there when it is its turn.

        Of each batch at its turn, that is: the last of them may have gone since.
        """
        while rows := self._index.all(_ROWS, (done, end, _SOME)):
            for n, ns, number, digest, size, trailer in rows:
                ref = BlobRef(class_of(number), BlobDigest(digest), size, trailer)
                yield n, ns, ref
                done = n

    def _remove_tampered(self, n: int, ns: int) -> int:
        """Hold the nodes that own a file to their MACs; answers how many went."""
        owners = [node for (node,) in self._index.all(_OWNERS, (n,))]
        return sum(not self._lookup.is_ours(ns, node) for node in owners)

    def _is_damaged(self, ns: int, ref: BlobRef, stop: threading.Event) -> bool | None:
        """Read a file, and remove what owns it if it is damaged; None if stopped."""
        namespace = self._namespace(ns)
        try:
            with self._files.open(namespace.id, ref) as file:
                digest = _digest(file, ref.size, stop)
        except (FileNotFoundError, NotADirectoryError):
            reason = RemovalReason.MISSING
        except UnfitFileError:
            reason = RemovalReason.DAMAGED
        except OSError as error:
            # Too many open files, no permission, a volume that is going: not the blob.
            raise StorageError("a blob's file could not be opened") from error
        else:
            if digest is None:
                return None
            if digest == ref.digest:
                return False
            reason = RemovalReason.DAMAGED
        try:
            self._reader.report(namespace, ref, reason)
        except GoneError:
            return False  # Removed by design, while it was read or before.
        return True

    def _count(self, size: int, tampered: int, *, is_damaged: bool) -> None:
        now = self._progress
        self._progress = attrs.evolve(
            now,
            checked=now.checked + 1,
            nbytes=now.nbytes + size,
            damaged=now.damaged + is_damaged,
            tampered=now.tampered + tampered,
            remaining=max(0, now.remaining - 1),
        )

    def _namespace(self, n: int) -> Namespace:
        if (found := self._namespaces.get(n)) is None:
            ((name, identity, scope, block_size),) = self._index.all(
                "SELECT id, identity, scope, block_size FROM ns WHERE n = ?", (n,)
            )
            made_of = StateIdentity.from_json(json.loads(identity))
            found = self._namespaces[n] = Namespace(name, made_of, scope, block_size)
        return found

    def _ahead(self, done: int) -> tuple[int, int]:
        """How many files there are after this row, and the last one's row."""
        ((count, last),) = self._index.all(_COUNT, (done,))
        return count, last or 0

    def _stored(self) -> tuple[int, int | None]:
        """Row of the last file that was checked, and when all had been."""
        ((done, completed),) = self._index.all("SELECT scrubbed, completed FROM root")
        return done, completed or None

    def _store(self, done: int, completed: int | None = None) -> None:
        try:
            with self._index.transaction():
                self._index.all(
                    "UPDATE root SET scrubbed = ?, completed = coalesce(?, completed)",
                    (done, completed),
                )
        except (DiskFullError, StorageError) as error:
            # What was read since the last time is read again.
            _log.warning("cache_scrub_not_stored", reason=error.code)


def _digest(file: BlobStream, size: int, stop: threading.Event) -> bytes | None:
    """Digest of the blob; None if stopped.

    Raises:
        UnfitFileError: the medium lost its bytes.
    """
    hasher = blake3()
    buffer = memoryview(bytearray(min(size, _CHUNK)))
    while size:
        if stop.is_set():
            return None
        count = read_some(file, buffer[:size])
        hasher.update(buffer[:count])
        size -= count
    return hasher.digest()
