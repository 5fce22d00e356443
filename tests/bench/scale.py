"""What a cache of many entries costs: its start, its memory, its index, its lookups.

An entry is a segment of 256 tokens with one file. Most are filled in directly: real
rows, by the index's own code, and files that take a name and a size but no blocks; to
write a million files durably would take ten minutes. One path of 131,072 tokens is
stored as always, and looked up. Of times, what the process computed is shown too: the
rest is waiting for the disk, or for other programs. Each start runs in a process of its
own, which sweeps all of it; memory is that process's peak above what it was with all
imported.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import GIB, MIB
from kvport.manifest.nodes import ROOT_NODE, NodeId, node_id
from kvport.manifest.tokens import TOKEN_SIZE, encode_tokens, prefix_keys
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.records import BlobRef, Namespace, NodeRecord
from tests.bench.processes import peak_of
from tests.cache.builder import COLD, select, space, store

ENTRIES = (10_000, 100_000, 1_000_000)
ROUNDS = 3
LOOKUPS = 9
STORED = 2_000
"""Segments of the steady rate."""
BLOCK = 256
PROMPT = 131_072
PATH = 128
"""Segments of a path that is filled in."""
PATHS = 32
"""Such paths in one commit."""
BLOB = 4 * MIB
"""What a file of such a path says it has; it is all hole."""
CAP = 64 * GIB
_DROP = Path("/proc/sys/vm/drop_caches")


def table(result: dict) -> list[tuple[str, str]]:
    """Label and figure, for people."""
    rows = []
    for size in result["sizes"]:
        label = f"{size['entries']:,} entries"
        cold = size["cold_s"]
        rows += [
            (f"{label}: open + reconcile, warm",
             f"{size['warm_s']:.2f} s, {size['cpu_s']:.2f} computing"),
            (f"{label}: open + reconcile, cold, once",
             "not permitted" if cold is None else f"{cold:.2f} s"),
            (f"{label}: memory above idle", f"{size['rss_mib']:.0f} MiB"),
            (f"{label}: index, bytes per entry", f"{size['index_bytes']:.0f}"),
            (f"{label}: lookup of {PROMPT:,} tokens",
             f"{size['lookup_ms']:.1f} ms, {size['lookup_cpu_ms']:.1f} computing"),
            (f"{label}: stored segments per second", f"{size['stored_per_s']:.0f}"),
        ]  # fmt: skip
    return rows


def main() -> dict:
    return {
        "benchmark": "scale",
        "rounds": ROUNDS,
        "sizes": [_size(entries) for entries in ENTRIES],
    }


def _size(entries: int) -> dict:
    with tempfile.TemporaryDirectory(
        dir=os.environ.get("KVPORT_BENCH_DIR"), prefix="kvport-scale-"
    ) as name:
        root = Path(name, "cache")
        _child("fill", root, entries)
        os.sync()
        index = (root / "index.sqlite").stat().st_size
        warm = [_child("open", root, "warm") for _ in range(ROUNDS)]
        cold = _child("open", root, "cold")
        used = _child("use", root)
    median = {
        name: statistics.median(found[name] for found in warm) for name in warm[0]
    }
    return {
        "entries": entries,
        "warm_s": median["seconds"],
        "cpu_s": median["processor"],
        "cold_s": cold.get("seconds"),
        "rss_mib": median["rss"] / MIB,
        "index_bytes": index / entries,
        **used,
    }


def _child(*arguments: object) -> dict:
    command = [sys.executable, "-m", "tests.bench.scale", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


# In the child.


def _opened(root: Path) -> Cache:
    def on_removed(gone) -> None:
        raise SystemExit(f"a start removed {len(gone)} nodes")

    return Cache.open(
        Opening(root=root, cap_bytes=CAP, free_floor=0, on_removed=on_removed)
    )


def open_root(root: Path, state: str) -> dict:
    if state == "cold":
        os.sync()
        try:
            _DROP.write_text("3")
        except OSError:
            return {}
    with peak_of(os.getpid()) as memory:
        began, before = time.perf_counter(), time.process_time()
        cache = _opened(root)
        seconds = time.perf_counter() - began
        processor = time.process_time() - before
    cache.close()
    return {"seconds": seconds, "processor": processor, "rss": memory.above_idle}


def use(root: Path) -> dict:
    """Look the long prompt up, and store at the size that there is."""
    with _opened(root) as cache:
        ns = space(cache)
        tokens = encode_tokens(_prompt(0))
        took, computing = [], []
        for _ in range(LOOKUPS):
            began, before = time.perf_counter(), time.process_time()
            match = cache.match(ns, tokens, select())
            took.append(time.perf_counter() - began)
            computing.append(time.process_time() - before)
            if match is None or match.position != PROMPT:
                raise SystemExit("the long prompt was not found")
        cuts = list(range(BLOCK, STORED * BLOCK + 1, BLOCK))
        began = time.perf_counter()
        store(cache, ns, _prompt(1, cuts[-1]), cuts, provenance=COLD)
        stored_s = time.perf_counter() - began
    return {
        "lookup_ms": statistics.median(took) * 1e3,
        "lookup_cpu_ms": statistics.median(computing) * 1e3,
        "stored_per_s": STORED / stored_s,
    }


def fill(root: Path, entries: int) -> dict:
    with _opened(root) as cache:
        ns = space(cache)
        cuts = list(range(BLOCK, PROMPT + 1, BLOCK))
        left = entries - len(cuts)
        store(cache, ns, _prompt(0), cuts, provenance=COLD)
        index, row = cache._index, cache._index.namespace_row(ns.id)
        directory = os.open(root / "ns" / ns.id, os.O_RDONLY | os.O_DIRECTORY)
        # What a crash would cost is filled again.
        index.all("PRAGMA synchronous=OFF")
        for number in itertools.count(2, PATHS):
            if not left:
                break
            with index.transaction():
                for path in range(number, number + PATHS):
                    for node in _path(ns, path, min(left, PATH)):
                        [ref] = node.blobs
                        index.add_file(row, ref, _make(directory, ref))
                        index.add_node(row, node)
                        left -= 1
        os.close(directory)
    return {}


def _prompt(number: int, length: int = PROMPT) -> list[int]:
    return np.random.default_rng(number).integers(0, 200_000, length).tolist()


def _path(ns: Namespace, number: int, count: int) -> Iterator[NodeRecord]:
    encoded = encode_tokens(_prompt(number, count * BLOCK))
    ends = range(BLOCK, count * BLOCK + 1, BLOCK)
    parent: NodeId = ROOT_NODE
    for end, key in zip(
        ends, prefix_keys(ns.identity.digest, ns.block_size, encoded, ends), strict=True
    ):
        digest = BlobDigest(blake3(key).digest())
        ref = BlobRef(BlobClass.KV, digest, BLOB, BLOCK * TOKEN_SIZE)
        name = node_id(parent, key, {ref.blob_class: ref.digest})
        yield NodeRecord(
            id=name,
            parent=parent,
            start=end - BLOCK,
            end=end,
            key=key,
            tokens=encoded[(end - BLOCK) * TOKEN_SIZE : end * TOKEN_SIZE],
            blobs=(ref,),
            kinds=frozenset(),
            attestations=(COLD,),
        )
        parent = name


def _make(directory: int, ref: BlobRef) -> int:
    """A file of a blob's size that is all hole; answers its allocated bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(ref.digest.hex(), flags, 0o600, dir_fd=directory)
    try:
        os.ftruncate(fd, ref.size + ref.trailer)
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fill", root, entries]:
            found = fill(Path(root), int(entries))
        case ["open", root, state]:
            found = open_root(Path(root), state)
        case ["use", root]:
            found = use(Path(root))
    print(json.dumps(found))
