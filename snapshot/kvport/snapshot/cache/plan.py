"""Plans: what would be removed, and why, before anything is.

In: victims, as the very code names them that removal goes by. Out: rows by namespace
and reason.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs
import structlog

from kvport.snapshot.cache.demand import Victim
from kvport.snapshot.cache.namespaces import KnownNamespace
from kvport.snapshot.cache.records import RemovalReason

_log = structlog.get_logger(__name__)


@attrs.frozen
class PlanRow:
    """Nodes of one namespace that go for one reason.

    Attributes:
        namespace: id.
        model: name of its model, as far as it is known.
        reason: why they go.
        nodes: how many.
        nbytes: allocated bytes of their files.
        oldest: when the first of them was used last, in seconds of the epoch.
        newest: when the last of them was.
        detail: why their namespace is incompatible, if that is the reason.
    """

    namespace: str
    model: str
    reason: RemovalReason
    nodes: int
    nbytes: int
    oldest: int
    newest: int
    detail: str | None = None


@attrs.frozen
class Plan:
    """What would go.

    Attributes:
        rows: by the order in which it goes.
        missing: bytes that would still have to go for the cap, or for all quotas,
            whichever is more.
        in_use: those of them that state has which is leased or pinned; the others are
            of the index and what else there is beside state.
        ended_pins: pins that end before, since they cover more than half of the cap
            with those that end later.
        over_quota: bytes in use that namespaces would hold above their quotas, by id.
    """

    rows: tuple[PlanRow, ...]
    missing: int
    in_use: int = 0
    ended_pins: int = 0
    over_quota: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def nodes(self) -> int:
        """How many go."""
        return sum(row.nodes for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of files that go."""
        return sum(row.nbytes for row in self.rows)

    def log(self) -> None:
        """Say it, before it happens."""
        if self.ended_pins:
            _log.warning("cache_unpinning_planned", pins=self.ended_pins)
        for row in self.rows:
            _log.warning(
                "cache_removal_planned",
                namespace=row.namespace,
                model=row.model,
                reason=row.reason.value,
                nodes=row.nodes,
                nbytes=row.nbytes,
                detail=row.detail,
            )


@attrs.frozen
class Freed:
    """What a removal did: allocated bytes by the account, and nodes by reason."""

    nbytes: int = 0
    nodes: Mapping[RemovalReason, int] = attrs.field(factory=dict)

    def __add__(self, other: "Freed") -> "Freed":
        nodes = dict(self.nodes)
        for reason, count in other.nodes.items():
            nodes[reason] = nodes.get(reason, 0) + count
        return Freed(self.nbytes + other.nbytes, nodes)


def draw_up(
    victims: Iterable[Victim],
    known: Iterable[KnownNamespace],
    missing: int = 0,
    incompatible: Callable[[str], str | None] = lambda _: None,
) -> Plan:
    """Add victims up.

    Args:
        victims: in order.
        known: namespaces that they may be of.
        missing: bytes that are to go.
        incompatible: why a namespace is, by id.
    """
    names = {one.n: one for one in known}
    rows: dict[tuple[int, RemovalReason], PlanRow] = {}
    for victim in victims:
        missing -= victim.nbytes
        row = rows.get((victim.ns, victim.reason))
        if row is None:
            one = names[victim.ns]
            why, at = victim.reason, victim.at
            detail = incompatible(one.id) if why is RemovalReason.INCOMPATIBLE else None
            row = PlanRow(one.id, one.model, why, 0, 0, at, at, detail)
        rows[victim.ns, victim.reason] = attrs.evolve(
            row,
            nodes=row.nodes + 1,
            nbytes=row.nbytes + victim.nbytes,
            oldest=min(row.oldest, victim.at),
            newest=max(row.newest, victim.at),
        )
    return Plan(tuple(rows.values()), max(0, missing))
