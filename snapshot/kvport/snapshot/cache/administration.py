"""Administration: what an operator sets, asks and removes, beside the requests.

In: settings of namespaces, orders about pins and what is to go. Out: what was done.
Reachable as `Cache.administration`; works with nothing loaded, and while requests run.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import attrs

from kvport.manifest.identity import KeyId
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.clear import Cleared, Clearing
from kvport.snapshot.cache.demand import Demand
from kvport.snapshot.cache.leases import LeaseInfo
from kvport.snapshot.cache.lifetimes import apply_ttl
from kvport.snapshot.cache.opening import Parts
from kvport.snapshot.cache.pins import PinInfo
from kvport.snapshot.cache.plan import Freed, draw_up
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.purge import Purged, purge
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.schema import class_of
from kvport.snapshot.cache.settlement import ALWAYS, Settlement
from kvport.snapshot.cache.tally import Held, Stored
from kvport.snapshot.cache.uploads import Uploads


@attrs.frozen
class NamespaceInfo:
    """One namespace as an operator sees it.

    Attributes:
        id: name of its directory.
        scope: who may see it.
        model: name of the model that was loaded last for it; empty if unknown.
        source: directory of that model; empty if unknown.
        loaded: when that was, in seconds of the epoch; 0 if unknown.
        block_size: tokens in a block.
        settings: in force.
        usage: files and allocated bytes by class of blob; of those that there are.
        incompatible: why its state cannot be used; None if it can.
        share: allocated bytes that no other namespace's state takes from it.
        over_quota: allocated bytes above its quota; as it settles, they are in use.
    """

    id: str
    scope: str
    model: str
    source: str
    loaded: int
    block_size: int
    settings: NamespaceSettings
    usage: Mapping[BlobClass, Held]
    incompatible: str | None
    share: int
    over_quota: int


class Administration(Settlement):
    """Of one open cache; thread-safe."""

    def __init__(
        self, parts: Parts, uploads: Uploads, flush: Callable[[], None]
    ) -> None:
        super().__init__(parts, uploads)
        self._tally: Final = parts.tally
        self._flush: Final = flush
        self._barred: Final = parts.barred

    # Settings.

    def settings(self, namespace_id: str) -> NamespaceSettings:
        """What is in force for a namespace, whether or not it exists."""
        return self._policies[namespace_id]

    def configure(self, namespace_id: str, settings: NamespaceSettings) -> Freed:
        """Set what is in force for a namespace, at once; answers what went for it.

        Its state's times are reckoned again, and what has expired by them, or is beyond
        its quota, goes before this returns, in batches. That is logged before.

        Args:
            namespace_id: of one that exists, or that may come to be.
            settings: all of them; what was set before is forgotten.

        Raises:
            DiskFullError: the volume has no room for a removal; the settings are set.
            StorageError: the index could not be written; the settings are set.
        """
        due = Demand(always=ALWAYS, thorough=True)
        with self._evictor.changes:
            self._policies.put(namespace_id, settings)
            self.apply_ttl(namespace_id, settings.ttl)
            victims = self._evictor.choice().victims(due)
            draw_up(victims, self._policies.namespaces.named()).log()
        return self._evictor.evict(due)

    def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """All namespaces, by id."""
        self._policies.judge()
        standings, stored = self._policies.standings(), self._tally.stored()
        return tuple(
            NamespaceInfo(
                id=one.id,
                scope=one.scope,
                model=one.model,
                source=one.source,
                loaded=one.loaded,
                block_size=one.block_size,
                settings=self._policies[one.id],
                usage=stored.get(one.n, Stored()).kinds,
                incompatible=standings[one.n].incompatible,
                share=standings[one.n].share,
                over_quota=standings[one.n].over_quota,
            )
            for one in self._policies.namespaces.all()
            if one.n in standings
        )

    # Holds.

    def leases(self) -> list[LeaseInfo]:
        """All leases that hold a node, the first to run out first."""
        return self._evictor.leases.listed()

    def pins(self) -> list[PinInfo]:
        """All pins that hold, the first to end first."""
        return self._evictor.pins.listed()

    def pin(self, namespace_id: str, node: NodeId, owner: str, seconds: int) -> int:
        """Hold a path until a fixed time, in place of what the owner had pinned there.

        Neither a use of the path nor another owner's pin changes it.

        Returns:
            When it ends: seconds from the epoch.

        Raises:
            ValueError: the path is empty, nobody is named, or no time.
            GoneError: the namespace or the node does not exist, or has expired.
            PinLimitError: pins would cover more than half of the cap.
            CapacityError: what is in use leaves no room for a row.
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        self._flush()
        ns = self._index.namespace_row(namespace_id)
        return self._evictor.small_change(
            functools.partial(self._evictor.pins.pin, ns, node, owner, seconds)
        )

    def unpin(self, namespace_id: str, node: NodeId, owner: str) -> bool:
        """End an owner's pin; whether there was one that held.

        Raises:
            GoneError: the namespace does not exist.
            DiskFullError: the volume is full.
            StorageError: the index could not be written.
        """
        ns = self._index.namespace_row(namespace_id)
        with self._evictor.changes:
            return self._evictor.relieved(
                functools.partial(self._evictor.pins.unpin, ns, node, owner)
            )

    # What ends by itself.

    def apply_ttl(self, namespace_id: str, ttl: int | None) -> None:
        """See `lifetimes.apply_ttl`."""
        apply_ttl(self._index, self._evictor, namespace_id, ttl)

    # What someone wants gone.

    def clear(
        self,
        namespace_ids: Sequence[str] | None = None,
        *,
        classes: Collection[BlobClass] | None = None,
        older_than: int | None = None,
        nodes: Sequence[NodeId] | None = None,
        force: bool = False,
        reason: RemovalReason = RemovalReason.CLEARED,
    ) -> Cleared:
        """Remove state, in batches, so that requests go on.

        What is leased or pinned is passed by, and all above it.

        Args:
            namespace_ids: where; None for everywhere.
            classes: drop these blobs only, and leave the nodes; with `kv`, or whatever
                else is all that a namespace has, nodes go whole. None for all.
            older_than: what was not used for as many seconds, and nothing below it.
            nodes: only paths that end here, as far as no other path needs them.
            force: what is leased or pinned goes as well; who reads it learns of it.
            reason: that is counted.

        Raises:
            ValueError: parts of paths were to be dropped.
            GoneError: a namespace does not exist; nothing was removed.
            DiskFullError: the index cannot grow for it; some of it may be done.
            StorageError: the index could not be written, likewise.
        """
        if nodes is not None and classes is not None:
            raise ValueError("a path goes whole, not by class")
        if namespace_ids is None:
            rows = [n for (n,) in self._index.all("SELECT n FROM ns ORDER BY n")]
        else:
            rows = [self._index.namespace_row(name) for name in namespace_ids]
        self._flush()
        with self._evictor.changes:
            self._evictor.relieved(self._index.store_touched)
        latest = None if older_than is None else self._index.clock.now() - older_than
        clearing = Clearing(
            self._index,
            self._account,
            self._evictor,
            latest=latest,
            force=force,
            reason=reason,
        )
        for ns in rows:
            if nodes is not None:
                for tip in nodes:
                    clearing.path(ns, tip)
            elif classes is None or self._is_all(ns, classes):
                clearing.whole(ns)
            else:
                clearing.parts(ns, classes)
        self._evictor.renew_ballast()
        return clearing.result

    def purge(self, keys: Collection[KeyId]) -> Purged:
        """Remove what came from these keys, and store nothing of theirs again.

        Once this returns nothing of it is found any more, nor comes after it: neither
        pins nor leases protect it.

        Raises:
            CacheAbsentError: the cache was closed.
            DiskFullError: the index cannot grow for it; some of it may be done.
            StorageError: the index could not be written, likewise.
        """
        with self._evictor.changes:
            # What the writer and admissions do from here on they do by it.
            self._barred.add(keys)
        self._flush()
        return purge(self._index, self._account, self._evictor, keys)

    def _is_all(self, ns: int, classes: Collection[BlobClass]) -> bool:
        """Whether nodes that lose these blobs have nothing left to restore from."""
        found = self._index.all(
            "SELECT DISTINCT class FROM file WHERE ns = ? AND live", (ns,)
        )
        there = {class_of(number) for (number,) in found}
        return BlobClass.KV in classes or there <= set(classes)
