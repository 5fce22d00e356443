"""Orders: what an operator may ask of a home's cache, with a server or without.

In: orders in plain words: a namespace by its id, the beginning of one, or its model's
name. Out: results in plain data. HTTP and the command line both go through here.

* Settings are kept by the `NamespaceBook`, and in force when an order returns.
* What a clearing is about may still be in memory: ends of replies that hang on what is
  to go are forgotten before, so that nothing brings it back.
"""

import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Final, Protocol

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.administration import NamespaceInfo
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.clear import Cleared
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.leases import LeaseInfo
from kvport.snapshot.cache.namespaces import Judge, unusable
from kvport.snapshot.cache.numbers import CacheStats
from kvport.snapshot.cache.pins import PinInfo
from kvport.snapshot.cache.plan import Freed, Plan
from kvport.snapshot.cache.room import Full, Limit
from kvport.snapshot.errors import (
    AmbiguousNamespaceError,
    ArtifactUnknownError,
    UnknownNamespaceError,
)
from kvport.snapshot.namespaces import Change, NamespaceBook
from kvport.snapshot.revoking import PurgeOutcome, Revoking
from kvport.snapshot.scrubbing import Scrubbing
from kvport.snapshot.transfer.kept import Known, known
from kvport.snapshot.transfer.ledger import Ledger

_LEAST_DIGITS: Final = 8
"""Of an id, to be taken for one."""

JUDGE: Final[Judge] = functools.partial(
    # By its metadata: the engine itself is not imported for that.
    unusable,
    mlx_lm=version("mlx-lm"),
    is_directory=os.path.isdir,
)
"""Which namespaces the installed engine cannot use, and why."""


class Settle(Protocol):
    """Does away with what is in memory only."""

    def __call__(self, namespaces: Collection[str] | None, *, drop: bool) -> None:
        """Drop or store what these namespaces have in memory; None for all."""


def _nothing(namespaces: Collection[str] | None, *, drop: bool) -> None:
    """Where no model is loaded, nothing is in memory only."""


@attrs.frozen(kw_only=True)
class ClearOrder:
    """What is to be cleared: what meets all of it.

    Attributes:
        namespace: as of `Orders.find`; None for all.
        kind: blobs of this class only; None for all.
        older_than: seconds for which it was not used; None for any time.
        artifact: the path of this artifact only, as far as no other path needs it.
        force: what is leased or pinned goes as well.
    """

    namespace: str | None = None
    kind: BlobClass | None = None
    older_than: int | None = None
    artifact: ArtifactId | None = None
    force: bool = False


@attrs.frozen(kw_only=True)
class Named:
    """What a namespace goes by."""

    id: str
    names: Sequence[str]
    scope: str
    is_usable: bool


@attrs.frozen
class Holds:
    """Why state stays: leases of what runs, and pins; the first to end first."""

    leases: tuple[LeaseInfo, ...]
    pins: tuple[PinInfo, ...]


class Orders:
    """Of one home; thread-safe. Each raises `StorageError` if the volume refuses."""

    def __init__(
        self,
        *,
        cache: Callable[[], Cache],
        book: NamespaceBook,
        ledger: Ledger,
        revoking: Revoking,
        settle: Settle = _nothing,
        reclaim: Callable[[], Freed] = Freed,
    ) -> None:
        """Orders about a cache.

        Args:
            cache: the open cache, or an error that says why there is none.
            book: the home's settings.
            ledger: the home's artifacts.
            revoking: of the home.
            settle: what to do about state that is in memory only.
            reclaim: what went beside, and counts for `gc`: what unloaded models left
                and nothing holds, or what an opening has swept.
        """
        self._cache: Final = cache
        self._book: Final = book
        self._ledger: Final = ledger
        self._revoking: Final = revoking
        self._settle: Final = settle
        self._reclaim: Final = reclaim
        self._changing: Final = threading.Lock()
        self.scrubbing: Final = Scrubbing(cache)

    def close(self) -> None:
        """End what runs by itself; to be called before the cache is closed."""
        self.scrubbing.stop()

    def stats(self) -> CacheStats:
        """All numbers, as of now."""
        return self._cache().stats()

    @property
    def full(self) -> Full | None:
        """Why nothing can be stored; None if there is room."""
        return self._cache().full

    def artifacts(self) -> list[Known]:
        """Exports that were kept and imports, newest first."""
        return known(self._cache(), self._ledger, self._ledger.artifacts())

    # Settings.

    def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """All namespaces, by id."""
        return self._cache().administration.namespaces()

    def names(self, namespace_id: str, model: str) -> tuple[str, ...]:
        """See `NamespaceBook.names`."""
        return self._book.names(namespace_id, model)

    def origins(self, one: NamespaceInfo) -> dict[str, str]:
        """See `NamespaceBook.origins`."""
        return self._book.origins(one.id, one.model, one.scope)

    def find(self, which: str) -> NamespaceInfo:
        """The namespace of this id, of an id that begins so, or of this model.

        A model is named by any of its names, or by name and scope as `NAME/SCOPE`. Of
        several that a model has had, the one is meant that can be used.

        Raises:
            UnknownNamespaceError: there is none.
            AmbiguousNamespaceError: there are several.
        """
        found = {one.id: one for one in self.namespaces()}
        return found[
            meant(
                which,
                [
                    Named(
                        id=one.id,
                        names=self.names(one.id, one.model),
                        scope=one.scope,
                        is_usable=one.incompatible is None,
                    )
                    for one in found.values()
                ],
            ).id
        ]

    def set_namespace(self, which: str, change: Change) -> tuple[NamespaceInfo, Freed]:
        """Change settings of a namespace, durably and at once.

        What has expired by a new time to live, and what it holds beyond a new quota,
        goes before this returns.

        Returns:
            How it is now, and what went.

        Raises:
            UnknownNamespaceError: there is no such namespace.
            AmbiguousNamespaceError: there are several.
            DiskFullError: the volume has no room for it.
        """
        with self._changing:
            info = self.find(which)
            with storage_io():
                self._book.change(info.id, change)
            settings = self._book.settings(info.id, info.model, info.scope)
            freed = self._cache().administration.configure(info.id, settings)
        return self.find(info.id), freed

    # Removal.

    def plan(
        self,
        *,
        cap: Limit = None,
        floor: Limit = None,
        quotas: Mapping[str, int | None] | None = None,
        gc: bool = False,
    ) -> Plan:
        """What would go, and why; nothing does.

        Args:
            cap: with this cap, at a start.
            floor: with this floor of free bytes, likewise.
            quotas: with these, by namespaces as of `find`; None for none.
            gc: by `gc`.

        Raises:
            CapacityError: the cap is too small to hold anything.
            UnknownNamespaceError: there is no such namespace.
            AmbiguousNamespaceError: there are several.
        """
        wanted = {self.find(which).id: size for which, size in (quotas or {}).items()}
        administration = self._cache().administration
        return administration.plan(cap=cap, floor=floor, quotas=wanted, gc=gc)

    def gc(self) -> Freed:
        """Remove what is of no use: see `Administration.gc`."""
        return self._reclaim() + self._cache().administration.gc()

    def clear(self, order: ClearOrder) -> Cleared:
        """Remove state because someone said so; what is held is passed by, and counted.

        Raises:
            UnknownNamespaceError: there is no such namespace.
            AmbiguousNamespaceError: there are several.
            ArtifactUnknownError: it was neither exported nor admitted here.
            DiskFullError: the index cannot grow for it; some of it may be done.
        """
        names, nodes = self._meant(order)
        # What was used just now is not old, nor of this artifact only: it is stored.
        drops = order.older_than is None and nodes is None
        self._settle(names, drop=drops)
        return self._cache().administration.clear(
            names,
            classes=None if order.kind is None else {order.kind},
            older_than=order.older_than,
            nodes=nodes,
            force=order.force,
        )

    def purge(self) -> PurgeOutcome:
        """Do away with what came from revoked keys: see `Revoking.purge`."""
        return self._revoking.purge()

    # Holds.

    def holds(self) -> Holds:
        """All leases and pins."""
        administration = self._cache().administration
        return Holds(tuple(administration.leases()), tuple(administration.pins()))

    def release(self, owner: str, node: str | None = None) -> tuple[int, Freed]:
        """End pins of one owner; what they held beyond a limit goes at once.

        Args:
            owner: whose pins; nobody else's are touched.
            node: the beginning of a node's name, in hex; None for all of the owner's.

        Returns:
            How many pins there were, and what went.

        Raises:
            DiskFullError: the volume has no room for it; the pins have ended.
        """
        administration = self._cache().administration
        ended = sum(
            administration.unpin(pin.namespace, pin.node, owner)
            for pin in administration.pins()
            if pin.owner == owner and pin.node.hex().startswith(node or "")
        )
        return ended, administration.settle() if ended else Freed()

    def _meant(
        self, order: ClearOrder
    ) -> tuple[Sequence[str] | None, Sequence[NodeId] | None]:
        """Ids of the namespaces, and ends of paths; None for all."""
        if order.artifact is None:
            if order.namespace is None:
                return None, None
            return [self.find(order.namespace).id], None
        records = [one for one in self._ledger.artifacts() if one.id == order.artifact]
        if not records:
            raise ArtifactUnknownError("no artifact of this id is known here")
        stored = {one.id for one in self.namespaces()}
        names = {record.namespace for record in records} & stored
        return sorted(names), sorted({record.tip for record in records})


def meant(which: str, among: Sequence[Named]) -> Named:
    """The one that an operator means: see `Orders.find`.

    Raises:
        UnknownNamespaceError: there is none.
        AmbiguousNamespaceError: there are several.
    """
    found = [one for one in among if _is_meant(one, which)]
    if len(found) > 1:
        usable = [one for one in found if one.is_usable]
        found = usable if len(usable) == 1 else found
    if not found:
        raise UnknownNamespaceError(f"no namespace goes by {which!r}")
    if len(found) > 1:
        names = ", ".join(f"{one.id[:12]} ({one.scope})" for one in found)
        raise AmbiguousNamespaceError(f"{which!r} may be any of {names}")
    return found[0]


def _is_meant(one: Named, which: str) -> bool:
    digits = which.lower()
    return (
        (len(digits) >= _LEAST_DIGITS and one.id.startswith(digits))
        or which in one.names
        or which in {f"{name}/{one.scope}" for name in one.names}
    )
