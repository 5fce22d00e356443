"""Leases: owned holds that keep nodes, and hence their ancestors, from eviction.

In: a node's id, an owner, seconds. Out: what eviction must pass by, pins included. A
*reading* lease keeps all blobs of its path as well: an export reads them, where a chain
only hangs on it. Leases live as long as the process, and each until a fixed time of the
boot clock: one that ran out holds nothing, and says so to who uses it. Nobody ends or
shortens another's. Damage is removed in spite of them.
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

import attrs

from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.pins import Pins
from kvport.snapshot.errors import GoneError

LEASE_SECONDS: Final = 3600
"""More than any one step takes that reads or stores; who waits on others asks for less.
"""


@attrs.frozen
class LeaseInfo:
    """One lease that holds, for people who ask why something stays.

    Attributes:
        owner: who holds.
        namespace: id of the namespace.
        node: name of the path that is held.
        tokens: its length.
        reading: whether its blobs are being read.
        seconds_left: until it runs out.
    """

    owner: str
    namespace: str
    node: NodeId
    tokens: int
    reading: bool
    seconds_left: float


class Leases:
    """All leases of a cache; guarded by the index's lock, like what they hold."""

    def __init__(self, index: Index, pins: Pins, boot: Callable[[], float]) -> None:
        self._index: Final = index
        self.pins: Final = pins
        self._boot: Final = boot
        self._held: dict[tuple[int, NodeId], set[Lease]] = {}

    def __len__(self) -> int:
        """Nodes that eviction passes by, at most."""
        return self.leased + len(self.pins)

    @property
    def leased(self) -> int:
        """Nodes that leases name."""
        with self._index.lock:
            return len({(lease.ns, lease.tip) for lease in self._valid()})

    def holds(self, ns: int, node: NodeId, *, pinned: bool = True) -> bool:
        """Whether a lease names this very node, or a pin, unless those are to end."""
        with self._index.lock:
            leases = self._held.get((ns, node), ())
            return any(lease.valid for lease in leases) or (
                pinned and self.pins.holds(ns, node)
            )

    def rows(self, ns: int, *, reading: bool = False) -> list[int]:
        """Row numbers of the nodes that leases of a namespace name, or reading ones."""
        with self._index.lock:
            nodes = {
                lease.tip
                for lease in self._valid()
                if lease.ns == ns and (lease.reading or not reading)
            }
            found = (self._index.find(ns, node) for node in nodes)
            return [n for n in found if n is not None]

    def listed(self) -> list[LeaseInfo]:
        """All that hold a node, the first to run out first."""
        with self._index.lock:
            now = self._boot()
            found = [
                LeaseInfo(
                    owner=lease.owner,
                    namespace=namespace,
                    node=lease.tip,
                    tokens=end,
                    reading=lease.reading,
                    seconds_left=lease.until - now,
                )
                for lease in self._valid()
                for namespace, end in self._index.all(
                    'SELECT ns.id, "end" FROM node JOIN ns ON ns.n = node.ns'
                    " WHERE node.n = ?",
                    (self._index.find(lease.ns, lease.tip),),
                )
            ]
        return sorted(found, key=lambda info: info.seconds_left)

    def acquire(
        self,
        ns: int,
        node: NodeId,
        owner: str,
        *,
        reading: bool = True,
        seconds: float = LEASE_SECONDS,
    ) -> "Lease":
        """Hold a node for some seconds.

        Raises:
            GoneError: it was removed.
        """
        lease = Lease(self, ns, owner, reading=reading, until=self._boot() + seconds)
        self.move(lease, node)
        return lease

    def move(self, lease: "Lease", new: NodeId) -> None:
        """Let a lease hold another node; see `Lease.move`."""
        with self._index.lock:
            lease.check()
            if new != ROOT_NODE and self._index.find(lease.ns, new) is None:
                raise GoneError("the segment to be leased was removed")
            self.forget(lease)
            lease.tip = new
            if new != ROOT_NODE:
                self._held.setdefault((lease.ns, new), set()).add(lease)

    def forget(self, lease: "Lease") -> None:
        """Hold nothing by this lease; again does nothing."""
        with self._index.lock:
            where = lease.ns, lease.tip
            held = self._held.get(where, set())
            held.discard(lease)
            if not held:
                self._held.pop(where, None)

    def drop_gone(self) -> None:
        """End leases of nodes that were removed in spite of them."""
        with self._index.lock:
            for lease in list(self._valid()):
                if self._index.find(lease.ns, lease.tip) is None:
                    lease.release()

    def ran_out(self, lease: "Lease") -> bool:
        """Whether a lease's time has come."""
        return self._boot() >= lease.until

    def renew(self, lease: "Lease", seconds: float) -> None:
        """Set a lease's time anew; see `Lease.renew`."""
        # Under the lock: what it holds may be about to be found free.
        with self._index.lock:
            lease.check()
            lease.until = self._boot() + seconds

    def _valid(self) -> "Iterator[Lease]":
        for lease in [lease for held in self._held.values() for lease in held]:
            if lease.valid:
                yield lease
            else:
                self.forget(lease)


class Lease:
    """One hold; a context manager that ends it.

    Attributes:
        ns: the namespace's row.
        owner: who holds, for people who ask why something stays.
        reading: whether the blobs of the path are held as well.
        tip: the node held, or that was held last; `ROOT_NODE` holds nothing.
        until: when it runs out, on the boot clock; changed by `renew` only.
    """

    def __init__(
        self, leases: Leases, ns: int, owner: str, *, reading: bool, until: float
    ) -> None:
        self.ns: Final = ns
        self.owner: Final = owner
        self.reading: Final = reading
        self.tip = ROOT_NODE
        self.until = until
        self._leases: Final = leases
        self._released = False

    @property
    def valid(self) -> bool:
        """Whether it holds still: neither released nor run out."""
        return not self._released and not self._leases.ran_out(self)

    def check(self) -> None:
        """To be called after what was read under the lease, which is in doubt if not.

        Raises:
            GoneError: it holds no more.
        """
        if not self.valid:
            raise GoneError("a lease was released, or ran out, before its use ended")

    def renew(self, seconds: float) -> None:
        """Hold for this long from now on.

        Raises:
            GoneError: it holds no more, and what it held may be gone.
        """
        self._leases.renew(self, seconds)

    def move(self, tip: NodeId) -> None:
        """Hold another node instead, without a moment in between.

        Raises:
            GoneError: the other node was removed, and the hold is as it was; or the
                lease holds no more.
        """
        self._leases.move(self, tip)

    def release(self) -> None:
        """End the hold; a second time does nothing."""
        self._released = True
        self._leases.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
