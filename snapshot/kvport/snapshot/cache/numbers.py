"""The cache's numbers: what is held, and what was counted, as of one moment.

In: index, account, counters. Out: `CacheStats`. Bytes are allocated ones; what the
namespaces hold and what stands beside them is the account's total, always, and what a
walk of the root finds when nothing is going on.
"""

from collections.abc import Mapping

import attrs

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.account import AccountNumbers
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.stats import Counted
from kvport.snapshot.cache.tally import Held, Stored


@attrs.frozen(kw_only=True)
class NamespaceStats:
    """One namespace.

    Attributes:
        id: its name, and its directory's.
        scope: whose state it is.
        model: the model's name at its last load; empty if that is not known.
        source: where the model was loaded from then; empty likewise.
        loaded: epoch seconds of that load, 0 if it is not known.
        block_size: tokens.
        nodes: stored segments.
        tokens: rows in them, each counted once for every segment that holds it.
        kinds: files and allocated bytes by class.
        counted: since the start.
    """

    id: str
    scope: str
    model: str
    source: str
    loaded: int
    block_size: int
    nodes: int
    tokens: int
    kinds: Mapping[BlobClass, Held]
    counted: Counted

    @property
    def files(self) -> int:
        """Files of all classes."""
        return sum(kind.files for kind in self.kinds.values())

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all files."""
        return sum(kind.nbytes for kind in self.kinds.values())


@attrs.frozen(kw_only=True)
class CacheStats:
    """All numbers.

    Attributes:
        account: what is held below the root.
        staging: bytes of uploads that are not admitted yet; reserved, like all of
            `account.held`, before they are written.
        namespaces: by id.
        gone: counts of namespaces that are there no more.
        leases: nodes that are leased.
        pins: nodes that are pinned.
        clock_behind: whether the system's clock is behind the latest time seen by so
            much that state with an expiry is not read until it catches up.
        index_resets: times that the index was lost, and the cache emptied.
        since: epoch seconds from which on is counted.
    """

    account: AccountNumbers
    staging: int
    namespaces: tuple[NamespaceStats, ...]
    gone: Counted
    leases: int
    pins: int
    clock_behind: bool
    index_resets: int
    since: float

    @property
    def total_bytes(self) -> int:
        """Everything below the root, and what is reserved to be written there."""
        return self.account.reserved

    @property
    def beside(self) -> Mapping[str, int]:
        """Bytes that are no namespace's.

        `index`: the database and its log; `overhead`: directories, root.json and the
        ballast; `staging`: uploads; `held`: reserved for what is to be written;
        `orphans`: files that nobody needs and that could not be unlinked.
        """
        stored = sum(namespace.nbytes for namespace in self.namespaces)
        return {
            "index": self.account.index,
            "overhead": self.account.overhead,
            "staging": self.staging,
            "held": max(0, self.account.held - self.staging),
            "orphans": max(0, self.account.blobs - stored),
        }

    @property
    def total(self) -> Counted:
        """Counts of all namespaces, present and gone."""
        return Counted.total([self.gone, *(n.counted for n in self.namespaces)])


class Numbers:
    """Reads all numbers of one open cache."""

    def __init__(self, parts: Parts) -> None:
        self._index = parts.index
        self._files = parts.files
        self._account = parts.account
        self._leases = parts.evictor.leases
        self._counters = parts.counters
        self._tally = parts.tally

    def read(self) -> CacheStats:
        """All numbers, as of now.

        Whoever changes rows changes account and counters before it lets go of the
        index's lock: so they agree here.

        Raises:
            StorageError: the index could not be read.
        """
        staged = self._files.staged_bytes()
        with self._index.lock:
            counted = dict(self._counters.counted())
            account = self._account.numbers
            stored = self._tally.stored()
            namespaces = tuple(
                _namespace(row, stored.get(row[0], Stored()), counted.pop(row[1], None))
                for row in self._index.all(
                    "SELECT n, id, scope, block_size, model, source, loaded FROM ns"
                    " ORDER BY id"
                )
            )
            return CacheStats(
                account=account,
                # They are measured before: some may be blobs by now.
                staging=min(staged, account.held),
                namespaces=namespaces,
                gone=Counted.total(counted.values()),
                leases=self._leases.leased,
                pins=len(self._leases.pins),
                clock_behind=self._index.clock.behind,
                index_resets=self._counters.index_resets,
                since=self._counters.since,
            )


def _namespace(
    row: tuple[int, str, str, int, str, str, int],
    stored: Stored,
    counted: Counted | None,
) -> NamespaceStats:
    _, name, scope, block_size, model, source, loaded = row
    return NamespaceStats(
        id=name,
        scope=scope,
        model=model,
        source=source,
        loaded=loaded,
        block_size=block_size,
        nodes=stored.nodes,
        tokens=stored.tokens,
        kinds=stored.kinds,
        counted=counted or Counted(),
    )
