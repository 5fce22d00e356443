"""What the cache counts since its start: for each namespace, and for all.

In: what happened, said by whoever did it. Out: a copy of the counts, taken at once.
What is held now is not counted here, but read: see `numbers`.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final, Self

import attrs

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.budget import WriteBudget
from kvport.snapshot.cache.clock import boot_seconds
from kvport.snapshot.cache.records import RemovalReason


class SkipReason(StrEnum):
    """Why a segment was not stored."""

    CAPACITY = "capacity"
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    GONE = "gone"
    CLOSED = "closed"
    INTERNAL = "internal"
    QUOTA = "quota"
    WRITE_BUDGET = "write_budget"
    TIER = "tier"
    """The namespace is read-only or off."""
    DEADLINE = "deadline"
    """The cache was closed, and its volume took too long."""
    ABSENT = "absent"
    """The cache's volume went away."""
    EXPIRED = "expired"
    """Its time to live ran out before it was stored."""
    REVOKED = "revoked"
    """Some of it came from a key that was revoked meanwhile."""


@attrs.frozen
class Pruned:
    """Blobs of one class that nodes lost which stay."""

    blobs: int
    nbytes: int


@attrs.define
class Counted:
    """Counts of one namespace, or of several, since the start.

    Attributes:
        hits: lookups of requests that found a restore point.
        misses: lookups of requests that found none.
        refused_lookups: lookups of requests in a namespace that is off.
        restored_tokens: tokens that requests really started with.
        captured_tokens: rows of segments that chains brought and that were new.
        written: bytes of blobs that were not there yet, and that chains brought, or
            imports, of which also those that came to nothing.
        uploaded: those of imports.
        skipped: segments that were not stored.
        removed: nodes that went.
        pruned_blobs: blobs of nodes that stay.
        pruned_bytes: their sizes.
        cleared_blobs: blobs of nodes that stay, which an operator has cleared.
        cleared_bytes: their sizes.
        damaged: blobs that were found damaged or without their file.
        failed_prunings: paths that could not be pruned when they ended.
        failed_pins: paths that could not be pinned when they ended.
        ended_pins: pins that ended early, since the cap had become too small.
        last_use: epoch seconds of the last hit or new segment; None if there was none.
    """

    hits: int = 0
    misses: int = 0
    refused_lookups: int = 0
    restored_tokens: int = 0
    captured_tokens: int = 0
    written: Counter[BlobClass] = attrs.field(factory=Counter)
    uploaded: int = 0
    skipped: Counter[SkipReason] = attrs.field(factory=Counter)
    removed: Counter[RemovalReason] = attrs.field(factory=Counter)
    pruned_blobs: Counter[BlobClass] = attrs.field(factory=Counter)
    pruned_bytes: Counter[BlobClass] = attrs.field(factory=Counter)
    cleared_blobs: Counter[BlobClass] = attrs.field(factory=Counter)
    cleared_bytes: Counter[BlobClass] = attrs.field(factory=Counter)
    damaged: int = 0
    failed_prunings: int = 0
    failed_pins: int = 0
    ended_pins: int = 0
    last_use: float | None = None

    @property
    def written_bytes(self) -> int:
        """Bytes of all classes that were written, by chains and by imports."""
        return self.written.total()

    @property
    def written_per_restored_token(self) -> float | None:
        """Bytes written for each token restored; None before the first."""
        return _ratio(self.written_bytes, self.restored_tokens)

    @property
    def written_per_captured_token(self) -> float | None:
        """Bytes that chains wrote for each new token; None before the first."""
        return _ratio(self.written_bytes - self.uploaded, self.captured_tokens)

    @property
    def pruned(self) -> dict[BlobClass, Pruned]:
        """What was pruned, by class."""
        return _lost(self.pruned_blobs, self.pruned_bytes)

    @property
    def cleared(self) -> dict[BlobClass, Pruned]:
        """What was cleared of nodes that stay, by class."""
        return _lost(self.cleared_blobs, self.cleared_bytes)

    @classmethod
    def total(cls, parts: Iterable["Counted"]) -> Self:
        """The sum of all parts, which shares nothing with them."""
        whole = cls()
        for part in parts:
            whole.hits += part.hits
            whole.misses += part.misses
            whole.refused_lookups += part.refused_lookups
            whole.restored_tokens += part.restored_tokens
            whole.captured_tokens += part.captured_tokens
            whole.written.update(part.written)
            whole.uploaded += part.uploaded
            whole.skipped.update(part.skipped)
            whole.removed.update(part.removed)
            whole.pruned_blobs.update(part.pruned_blobs)
            whole.pruned_bytes.update(part.pruned_bytes)
            whole.cleared_blobs.update(part.cleared_blobs)
            whole.cleared_bytes.update(part.cleared_bytes)
            whole.damaged += part.damaged
            whole.failed_prunings += part.failed_prunings
            whole.failed_pins += part.failed_pins
            whole.ended_pins += part.ended_pins
            uses = [t for t in (whole.last_use, part.last_use) if t is not None]
            whole.last_use = max(uses, default=None)
        return whole


class Counters:
    """Since the start, by namespace id; thread-safe.

    Attributes:
        since: epoch seconds of the start.
        index_resets: times that the index was lost, and the cache emptied.
        budget: what was written within the last hour.
    """

    def __init__(self, boot: Callable[[], float] = boot_seconds) -> None:
        """Begin with nothing.

        Args:
            boot: seconds that never go back, for the budget.
        """
        self.budget: Final = WriteBudget(boot)
        self.since: Final = time.time()
        self.index_resets = 0
        self._lock = threading.Lock()
        self._by_namespace: defaultdict[str, Counted] = defaultdict(Counted)

    def counted(self) -> Mapping[str, Counted]:
        """A copy of all counts, as of one moment."""
        with self._lock:
            found = self._by_namespace.items()
            return {namespace: Counted.total([one]) for namespace, one in found}

    def add_lookup(self, namespace: str, *, hit: bool) -> None:
        """A request's lookup, which found something or did not."""
        with self._lock:
            counted = self._by_namespace[namespace]
            if hit:
                counted.hits += 1
                counted.last_use = time.time()
            else:
                counted.misses += 1

    def add_refused_lookup(self, namespace: str) -> None:
        """A request's lookup in a namespace that is off."""
        with self._lock:
            self._by_namespace[namespace].refused_lookups += 1

    def add_restored(self, namespace: str, tokens: int) -> None:
        """Tokens that a request started with."""
        with self._lock:
            self._by_namespace[namespace].restored_tokens += tokens

    def add_captured(self, namespace: str, tokens: int) -> None:
        """Tokens of a segment that was new."""
        with self._lock:
            counted = self._by_namespace[namespace]
            counted.captured_tokens += tokens
            counted.last_use = time.time()

    def add_written(self, namespace: str, blob_class: BlobClass, nbytes: int) -> None:
        """Bytes of a blob that was really written."""
        with self._lock:
            self._by_namespace[namespace].written[blob_class] += nbytes

    def add_uploaded(self, namespace: str, blob_class: BlobClass, nbytes: int) -> None:
        """Bytes of a blob that an import wrote."""
        with self._lock:
            counted = self._by_namespace[namespace]
            counted.written[blob_class] += nbytes
            counted.uploaded += nbytes

    def add_skipped(self, namespace: str, reason: SkipReason) -> None:
        """A segment that was not stored."""
        with self._lock:
            self._by_namespace[namespace].skipped[reason] += 1

    def add_removed(self, namespace: str, reason: RemovalReason, count: int) -> None:
        """Nodes that went."""
        with self._lock:
            self._by_namespace[namespace].removed[reason] += count

    def add_pruned(self, namespace: str, blob_class: BlobClass, nbytes: int) -> None:
        """A blob that a node lost, and stays without."""
        with self._lock:
            counted = self._by_namespace[namespace]
            counted.pruned_blobs[blob_class] += 1
            counted.pruned_bytes[blob_class] += nbytes

    def add_cleared(self, namespace: str, blob_class: BlobClass, nbytes: int) -> None:
        """A blob that was cleared of a node that stays."""
        with self._lock:
            counted = self._by_namespace[namespace]
            counted.cleared_blobs[blob_class] += 1
            counted.cleared_bytes[blob_class] += nbytes

    def add_failed_pruning(self, namespace: str) -> None:
        """A path that could not be pruned."""
        with self._lock:
            self._by_namespace[namespace].failed_prunings += 1

    def add_ended_pins(self, namespace: str, count: int) -> None:
        """Count pins that ended early."""
        with self._lock:
            self._by_namespace[namespace].ended_pins += count

    def add_failed_pin(self, namespace: str) -> None:
        """A path that could not be pinned."""
        with self._lock:
            self._by_namespace[namespace].failed_pins += 1

    def add_damaged(self, namespace: str) -> None:
        """A blob that was found damaged or without its file."""
        with self._lock:
            self._by_namespace[namespace].damaged += 1


def _lost(
    blobs: Counter[BlobClass], nbytes: Counter[BlobClass]
) -> dict[BlobClass, Pruned]:
    return {kind: Pruned(count, nbytes[kind]) for kind, count in blobs.items()}


def _ratio(nbytes: int, tokens: int) -> float | None:
    return nbytes / tokens if tokens else None
