"""Operations of the matrix: each prepares a directory once, and is run in copies of it.

A run acknowledges what is durable from then on. To add one: a function that runs, and
if need be one that prepares, and its line in `OPERATIONS`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from kvport.manifest.identity import PointKind
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.retention import Retention
from tests.cache.builder import encode_tokens, judge, segments, select
from tests.crash.places import HomePlace, Place, TightPlace
from tests.crash.wants import Want
from tests.transfer.world import TOKENS, Home

Acknowledge = Callable[[Want], None]

KEEP = Retention(newest=200, every=1000)
STRIDE = 100


@attrs.frozen
class Operation:
    """One line of the matrix.

    Attributes:
        name: of the operation.
        run: does it, in an open place; the base directory holds what it needs.
        prepare: makes what is there before, given the base and an open place; None for
            nothing at all, not even a cache.
        spoil: damages the prepared directory, once it is closed.
        opens: how the place is opened.
        damaged: the prepared directory has lost state on purpose.
        evicts: what was there before may go for it.
    """

    name: str
    run: Callable[[Place, Path, Acknowledge], None]
    prepare: Callable[[Place, Path, Acknowledge], None] | None
    spoil: Callable[[Path], None] | None = None
    opens: type[Place] = Place
    damaged: bool = False
    evicts: bool = False


# Storing.


def put(
    place: Place,
    space: str,
    tokens: Sequence[int],
    cuts: Sequence[int],
    *,
    tip: NodeId = ROOT_NODE,
    retention: Retention | None = None,
    **options,
) -> bool:
    """Store a path, durably; whether all of it was."""
    ns = place.space(space)
    chain = place.cache.chain(ns, tip, "crash", retention)
    for segment in segments(ns, tokens, cuts, **options):
        chain.append(segment)
    chain.close()
    place.cache.flush()
    return chain.broken is None


def prompt(number: int, length: int = 300) -> tuple[int, ...]:
    return (number, *range(length - 1))


def turns(name: int, count: int) -> Iterator[tuple[list[int], dict]]:
    """A conversation whose template drops half of each reply, turn by turn."""
    history: list[int] = []
    for turn in range(count):
        first = 10_000 * name + 1000 * turn
        asked = [*history, *range(first, first + 60)]
        said = range(first + 500, first + 560)
        fork, end = len(asked) - 10, len(asked) + len(said)
        points = {
            fork: {PointKind.FORK},
            len(asked) - 1: {PointKind.PROMPT},
            end: {PointKind.REPLY},
        }
        for position in range(STRIDE, end + 1, STRIDE):
            points.setdefault(position, set()).add(PointKind.STRIDE)
        yield [*asked, *said], points
        history = [*asked[:fork], *said[30:]]


def converse(place: Place, space: str, name: int, ack: Acknowledge, count: int) -> None:
    """Turns with retention, which prunes the points that each one replaces."""
    for tokens, points in turns(name, count):
        ns = place.space(space)
        limit = select(limit=len(tokens) - 61)
        found = place.cache.match(ns, encode_tokens(tokens), limit)
        start = found.base if found else 0
        cuts = [cut for cut in sorted(points) if cut > start]
        tip = found.tip if found else ROOT_NODE
        if put(
            place, space, tokens, cuts, tip=tip, start=start, states=list(points),
            kinds=points, variant=name, retention=KEEP,
        ):  # fmt: skip
            ack(Want("stored", space, tuple(tokens), len(tokens)))


def store(place: Place, base: Path, ack: Acknowledge) -> None:
    """Chains side by side, in several namespaces; conversations; equal bytes twice."""
    with ExitStack() as open_chains:
        some = {}
        for space, number in (("dense", 1), ("other", 1), ("hybrid", 2)):
            ns = place.space(space)
            chain = place.cache.chain(ns, ROOT_NODE, "crash")
            open_chains.callback(chain.close)
            paths = segments(ns, prompt(number), [100, 200, 300], size=3000)
            some[space, number] = chain, list(paths)
        for at in range(3):
            for chain, path in some.values():
                chain.append(path[at])
    place.cache.flush()
    for (space, number), (chain, _) in some.items():
        if chain.broken is None:
            ack(Want("stored", space, prompt(number), 300))
    converse(place, "all", 1, ack, 4)
    converse(place, "windowed", 2, ack, 2)
    if put(place, "dense", prompt(3), [256, 300], size=100_000):
        ack(Want("stored", "dense", prompt(3), 300))


def some_state(place: Place, base: Path, ack: Acknowledge) -> None:
    """What every cache has that was used for a while."""
    converse(place, "hybrid", 3, ack, 2)
    for number in (8, 9):
        assert put(place, "dense", prompt(number), [100, 300])
        ack(Want("stored", "dense", prompt(number), 300))


# Removing.

LARGE = 150_000
"""Bytes of a blob of which eighteen fit under the smallest cap."""


def full(place: Place, base: Path, ack: Acknowledge) -> None:
    for number in range(8):
        assert put(place, "dense", prompt(number), [100, 300], size=LARGE)
        ack(Want("stored", "dense", prompt(number), 300))


def evict(place: Place, base: Path, ack: Acknowledge) -> None:
    """Store beyond the cap, look up what shall stay, and lose a blob."""
    for number in range(10, 14):
        if put(place, "dense", prompt(number), [100, 300], size=LARGE):
            ack(Want("stored", "dense", prompt(number), 300))
    ns = place.space("dense")
    lost = place.cache.match(ns, encode_tokens(prompt(10)), select())
    if lost is not None:
        place.cache.report_damage(ns, lost.nodes[0].blobs[0])
        ack(Want("gone", "dense", prompt(10)))


def clear(place: Place, base: Path, ack: Acknowledge) -> None:
    """Clear one namespace whole, and another of its restore points' state."""
    dense, hybrid = place.space("dense"), place.space("hybrid")
    place.cache.administration.clear([dense.id])
    for number in (8, 9):
        ack(Want("gone", "dense", prompt(number)))
    place.cache.administration.clear([hybrid.id], classes=[BlobClass.STATE])
    *_, (tokens, _) = turns(3, 2)
    ack(Want("gone", "hybrid", tuple(tokens)))
    if put(place, "other", prompt(4), [100, 300]):
        ack(Want("stored", "other", prompt(4), 300))


def collect(place: Place, base: Path, ack: Acknowledge) -> None:
    """Collect the state of a namespace that cannot be used any more."""
    judge(place.cache, {place.space("dense").id: "gone"})
    place.cache.administration.gc()
    for number in (8, 9):
        ack(Want("gone", "dense", prompt(number)))
    if put(place, "other", prompt(4), [100, 300]):
        ack(Want("stored", "other", prompt(4), 300))


# Starting.


def begin(place: Place, base: Path, ack: Acknowledge) -> None:
    """The very first start, and a first path."""
    if put(place, "dense", prompt(1), [100, 300]):
        ack(Want("stored", "dense", prompt(1), 300))


def debris(place: Place, base: Path, ack: Acknowledge) -> None:
    """State of which some will be missing, and doomed files that nobody unlinked."""
    some_state(place, base, ack)
    for number in range(20, 24):
        assert put(place, "dense", prompt(number), [100, 300], size=5000)
    ns = place.space("dense")
    doomed = place.cache.match(ns, encode_tokens(prompt(23)), select())
    place.cache._evictor.unlink_doomed = lambda: None
    place.cache.report_damage(ns, doomed.nodes[0].blobs[0])
    ack(Want("gone", "dense", prompt(23)))


def spoil(directory: Path) -> None:
    root = directory / "cache"
    large = [p for p in sorted(root.glob("ns/*/*")) if p.stat().st_size >= 5000]
    large[0].unlink()
    large[1].write_bytes(b"cut")
    (large[2].parent / "not-a-digest").write_bytes(bytes(5000))
    for orphan in (root / "ns" / ("0" * 64), root / "staging" / "upload"):
        orphan.mkdir()
        (orphan / ("1" * 64)).write_bytes(bytes(9000))


def sweep(place: Place, base: Path, ack: Acknowledge) -> None:
    """The start did it."""
    ack(Want("gone", "dense", prompt(23)))


# Importing.


def artifact(place: Place, base: Path, ack: Acknowledge) -> None:
    """An artifact from elsewhere; half of its path is here, from another one."""
    assert place.home is not None
    origin = Home(base / "origin")
    origin.store()
    (base / "artifact").write_bytes(origin.export())
    (base / "key").write_bytes(origin.key.to_bytes())
    part = origin.export(TOKENS[:10])
    origin.close()
    place.home.trusted.append(origin.key)
    place.home.take(part)
    ack(Want("stored", "home", tuple(TOKENS[:10]), 10))


def take(place: Place, base: Path, ack: Acknowledge) -> None:
    """An import that is given up, and one that is not."""
    home = place.home
    assert home is not None
    home.trusted.append(SigningKey.from_bytes((base / "key").read_bytes()))
    data = (base / "artifact").read_bytes()
    given_up = home.start_import()
    given_up.feed(data[: len(data) * 3 // 4])
    given_up.abort()
    done = home.take(data, step=4096)
    ack(Want("stored", "home", tuple(TOKENS), 11))
    ack(Want("artifact", str(done.artifact_id)))


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("store", store, some_state),
        Operation("evict", evict, full, opens=TightPlace, evicts=True),
        Operation("clear", clear, some_state),
        Operation("gc", collect, some_state),
        Operation("import", take, artifact, opens=HomePlace),
        Operation("begin", begin, None),
        Operation("sweep", sweep, debris, spoil, damaged=True),
    )
}
