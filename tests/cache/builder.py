"""Segments with made-up bytes, stored in real caches; and a walk to hold them to."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from blake3 import blake3

from kvport.manifest.identity import (
    KeyId,
    Lineage,
    Numerics,
    PointKind,
    Provenance,
    StateIdentity,
)
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.manifest.tokens import encode_tokens, prefix_keys
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.clock import Clocks
from kvport.snapshot.cache.records import (
    ExactRule,
    Match,
    Namespace,
    NewSegment,
    NodeRecord,
    Pin,
    RemovalReason,
    Removed,
    Selection,
)
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.schema import class_number
from kvport.snapshot.errors import DamagedError

KV = CacheLayout("0", CacheKind.KV, None, (LeafSpec("k", "F16", (1, 2, -1, 3)),))
ROTATING = CacheLayout("1", CacheKind.ROTATING, 3, (LeafSpec("k", "F32", (1, -1, 2)),))
ARRAYS = CacheLayout("2", CacheKind.ARRAYS, None, (LeafSpec("s0", "F32", (1, 5)),))

DENSE = StateLayout((KV,))
WINDOWED = StateLayout((KV, ROTATING))
HYBRID = StateLayout((KV, ARRAYS))
ALL = StateLayout((KV, ROTATING, ARRAYS))

ME = KeyId("ed25519:" + "11" * 32)
OTHER = KeyId("ed25519:" + "22" * 32)
NUMERICS = Numerics("0.32.4", "cpu", "", "netlib", 1, 512, compile=False)
OTHER_NUMERICS = Numerics("0.32.4", "gpu", "applegpu_g16s", "", 0, 512, compile=True)
BLOCK = 256


def claim(
    lineage: Lineage = Lineage.DERIVED,
    origins: Sequence[KeyId] = (ME,),
    numerics: Numerics = NUMERICS,
) -> Provenance:
    return Provenance(lineage, numerics, frozenset(origins))


COLD = claim(Lineage.COLD)
DERIVED = claim(Lineage.DERIVED)


def identity_of(layout: StateLayout, model: int = 0) -> StateIdentity:
    return StateIdentity(f"blake3:{model:064x}", (), {}, "model", layout, "0.32.2")


class Time:
    """Clocks that stand still until a test lets them go on, or sets the wall's."""

    def __init__(self) -> None:
        self.boot = 1000.0
        self.wall = 1_800_000_000.0
        self.clocks = Clocks(boot=lambda: self.boot, wall=lambda: self.wall)

    def passes(self, seconds: float) -> None:
        self.boot += seconds
        self.wall += seconds


def open_cache(
    root: Path,
    cap: int | None = 64 * MIB,
    removed: list[Removed] | None = None,
    **options,
) -> Cache:
    """A cache that does nothing unasked: no floor, and no maintenance by the clock."""
    told = [] if removed is None else removed
    options = {"free_floor": 0, **options}
    opening = Opening(root=root, cap_bytes=cap, on_removed=told.extend, **options)
    cache = Cache.open(opening)
    cache._maintenance.stop(60)
    return cache


def space(
    cache: Cache,
    layout: StateLayout = DENSE,
    scope: str = "default",
    model: int = 0,
    **loaded: str,
) -> Namespace:
    return cache.namespace(identity_of(layout, model), scope, BLOCK, **loaded)


def judge(cache: Cache, reasons: Mapping[str, str]) -> None:
    """Have it that these namespaces cannot be used, whatever was judged before."""
    cache._policies._judge = lambda _: reasons
    cache._policies.judge()


def remove_ended(cache: Cache) -> int:
    """What maintenance does; answers how many nodes had expired."""
    cache.administration.drop_ended_pins()
    return cache.administration.settle().nodes.get(RemovalReason.EXPIRED, 0)


def noise(seed: object, size: int = 1000) -> bytes:
    return blake3(repr(seed).encode()).digest(length=size)


def segments(
    ns: Namespace,
    tokens: Sequence[int],
    cuts: Sequence[int],
    *,
    start: int = 0,
    variant: object = 0,
    states: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    kinds: dict[int, set[PointKind]] | None = None,
    size: int = 1000,
    provenance: Provenance | Callable[[int], Provenance] = DERIVED,
) -> Iterator[NewSegment]:
    """Segments of [start, cuts[-1]), with whole states and window rows at all cuts.

    Or at `states` and `windows` only.
    """
    wanted = {BlobClass.STATE: states, BlobClass.WINDOW: windows}
    encoded = encode_tokens(tokens)
    keys = prefix_keys(ns.identity.digest, ns.block_size, encoded, cuts)
    for end, key in zip(cuts, keys, strict=True):
        blobs = {}
        for blob_class in ns.layout.blob_classes:
            if (some := wanted.get(blob_class)) is not None and end not in some:
                continue
            data = noise((blob_class, variant, key), size)
            # In several buffers, as arrays come.
            blobs[blob_class] = [
                data[:7],
                bytearray(data[7:500]),
                memoryview(data)[500:],
            ]
        yield NewSegment(
            start=start,
            end=end,
            key=key,
            tokens=encoded[4 * start : 4 * end],
            kinds=frozenset((kinds or {}).get(end, ())),
            blobs=blobs,
            provenance=provenance(end) if callable(provenance) else provenance,
        )
        start = end


def store(
    cache: Cache,
    ns: Namespace,
    tokens: Sequence[int],
    cuts: Sequence[int],
    *,
    tip: NodeId = ROOT_NODE,
    retention: Retention | None = None,
    ttl: int | None = None,
    pin: Pin | None = None,
    **options,
) -> NodeId:
    """Store a path through a chain; answers the id of its end."""
    chain = cache.chain(ns, tip, "test", retention, ttl=ttl, pin=pin)
    for segment in segments(ns, tokens, cuts, **options):
        chain.append(segment)
    chain.close()
    cache.flush()
    assert chain.broken is None
    return chain.tip


def select(limit: int = 1 << 20, **options) -> Selection:
    if options.pop("exact", False):
        options["exact"] = ExactRule(512, NUMERICS)
    return Selection(limit=limit, local=ME, **options)


def find(cache: Cache, ns: Namespace, tokens: Sequence[int], **options) -> Match | None:
    return cache.match(ns, encode_tokens(tokens), select(**options))


def position(cache: Cache, ns: Namespace, tokens: Sequence[int], **options) -> int:
    match = find(cache, ns, tokens, **options)
    return match.position if match else 0


def read_all(cache: Cache, ns: Namespace, nodes: Sequence[NodeRecord]) -> list[bytes]:
    return [bytes(cache.read(ns, ref)) for node in nodes for ref in node.blobs]


def stored_tokens(cache: Cache, ns: Namespace, nodes: Sequence[NodeRecord]) -> bytes:
    """Encoded ids of a path, from behind its rows."""
    refs = (node.blob(BlobClass.KV) for node in nodes)
    return b"".join(cache._files.trailer(ns.id, ref) for ref in refs)


def with_tokens(nodes: Sequence[NodeRecord], tokens: bytes) -> list[NodeRecord]:
    """A path's records as an import has them."""
    return [attrs.evolve(n, tokens=tokens[4 * n.start : 4 * n.end]) for n in nodes]


def read_or_lose(cache: Cache, ns: Namespace, nodes: Sequence[NodeRecord]) -> bool:
    try:
        read_all(cache, ns, nodes)
    except DamagedError:
        return False
    return True


def walk(root: Path) -> int:
    """Allocated bytes of everything below the root, the root included."""
    total = root.stat().st_blocks
    for parent, directories, files in os.walk(root):
        for name in directories + files:
            total += os.lstat(Path(parent) / name).st_blocks
    return total * 512


def blob_files(root: Path) -> set[str]:
    return {path.name for path in root.glob("ns/*/*")}


def evict_all(cache: Cache) -> None:
    """Evict all that may be."""
    cache._evictor.free(1 << 60)


def check_account(cache: Cache, root: Path) -> None:
    """Idle: reserved is what the disk holds, and below the cap."""
    account = cache.stats().account
    assert account.held == 0
    assert account.reserved == walk(root)
    assert account.reserved <= account.cap
    assert 0 <= account.used_percent <= 100
    check_usage(cache)


def check_usage(cache: Cache) -> None:
    """What namespaces hold is what the index says, and all of the account's blobs."""
    rows = cache._index.all(
        "SELECT ns.id, class, sum(alloc), count(*) FROM file JOIN ns ON ns.n = ns"
        " GROUP BY 1, 2"
    )
    infos = cache.administration.namespaces()
    held = {
        (info.id, class_number(blob_class), held.nbytes, held.files)
        for info in infos
        for blob_class, held in info.usage.items()
    }
    assert held == set(rows)
    total = sum(nbytes for _, _, nbytes, _ in held)
    assert total == cache.stats().account.blobs


def used(cache: Cache, ns: Namespace) -> int:
    """Allocated bytes of a namespace's files."""
    [info] = [one for one in cache.administration.namespaces() if one.id == ns.id]
    return sum(held.nbytes for held in info.usage.values())
