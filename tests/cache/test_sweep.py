"""What a start finds, says and removes: all differences, the plan first, in batches."""

import random
import stat
from pathlib import Path

import pytest
from blake3 import blake3
from structlog.testing import capture_logs

from kvport.manifest.digests import BlobDigest
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.snapshot.cache import inventory, sweep
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.inventory import Difference, Inventory
from kvport.snapshot.cache.records import BlobRef
from tests.cache.builder import (
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    space,
    store,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


def expected(index, ns: int, directory: Path) -> Difference:
    """The same, row by row and file by file."""
    rows = {
        digest.hex(): (n, size, alloc, live)
        for n, digest, size, alloc, live in index.all(
            "SELECT n, digest, size + trailer, alloc, live FROM file WHERE ns = ?",
            (ns,),
        )
    }
    names = {path.name for path in directory.glob("*")}
    found = Difference(orphans=sorted(names - set(rows)))
    for name, (n, size, alloc, live) in rows.items():
        if not live:
            continue
        if name not in names:
            found.missing.append(n)
            continue
        real = (directory / name).lstat()
        if not stat.S_ISREG(real.st_mode) or real.st_size != size:
            found.damaged.append(n)
        if (now := real.st_blocks * 512) != alloc:
            found.resized.append((now, n))
            found.growth += now - alloc
    return found


def fill_one(index, ns: int, path: Path, rng: random.Random) -> None:
    """A row, or none, and a file that fits it, or not."""
    place = rng.choice([
        lambda: path.write_bytes(b"12345"),
        lambda: path.write_bytes(b"12345"),
        lambda: path.write_bytes(b"1234"),
        lambda: path.symlink_to("elsewhere"),
        path.mkdir,
        lambda: None,
    ])  # fmt: skip
    place()
    kind = rng.choice(["row", "row", "row", "resized", "doomed", "orphan"])
    if kind == "orphan":
        return
    ref = BlobRef(BlobClass.KV, BlobDigest(bytes.fromhex(path.name)), 3, 2)
    index.add_file(ns, ref, 16_384 if kind == "resized" else 4096)
    if kind == "doomed":
        index.all("UPDATE file SET live = 0 WHERE n = (SELECT max(n) FROM file)")


@pytest.mark.parametrize("seed", range(6))
def test_every_difference_is_found_and_no_other(cache, root, monkeypatch, seed):
    """Rows and files at random, in several batches, with digests that begin alike."""
    monkeypatch.setattr(inventory, "_SOME", 7)
    rng = random.Random(seed)
    digests = [
        blake3(bytes([i // 5])).digest()[:8] + blake3(bytes([i])).digest()[:24]
        for i in range(60)
    ]
    spaces = [space(cache, scope=scope) for scope in "abc"]
    index = cache._index
    rows = {ns.id: index.namespace_row(ns.id) for ns in spaces}
    for ns in spaces[: rng.choice([2, 3])]:
        directory = root / "ns" / ns.id
        with index.transaction():
            for digest in digests:
                fill_one(index, rows[ns.id], directory / digest.hex(), rng)
        for name in ("odd", "A" * 64, digests[0].hex() + ".1234abcd", "é" * 64):
            if rng.random() < 0.5:
                (directory / name).touch()
    if rng.random() < 0.5:
        (root / "ns" / spaces[0].id).rename(root / "elsewhere")
    found = Inventory(index)
    assert found.allocated == index.all("SELECT total(alloc) FROM file")[0][0]
    for ns in spaces:
        directory = root / "ns" / ns.id
        got = found.compare(rows[ns.id], directory)
        for values in (got.orphans, got.missing, got.damaged, got.resized):
            values.sort()
        want = expected(index, rows[ns.id], directory)
        for values in (want.missing, want.damaged, want.resized):
            values.sort()
        assert got == want


def test_a_blob_that_two_namespaces_have_is_lost_to_one_of_them(root):
    with open_cache(root) as cache:
        one, other = (space(cache, scope=scope) for scope in "ab")
        for ns in (one, other):
            tip = store(cache, ns, TOKENS, ENDS)
        assert len(blob_files(root)) == 3
        name = cache.path(other, tip)[1].blobs[0].digest.hex()
    (root / "ns" / one.id / name).unlink()
    with open_cache(root) as cache:
        assert position(cache, one, TOKENS) == ENDS[0]
        assert position(cache, other, TOKENS) == ENDS[-1]
        check_account(cache, root)


def test_b24_what_a_start_will_remove_is_logged_before_it_goes(root, monkeypatch):
    with open_cache(root) as cache:
        ns = space(cache)
        for number in range(4):
            store(cache, ns, [number, *TOKENS], ENDS)
        paths = [
            [
                root / "ns" / ns.id / node.blobs[0].digest.hex()
                for node in find(cache, ns, [number, *TOKENS]).nodes
            ]
            for number in range(4)
        ]
        doomed = find(cache, ns, [3, *TOKENS]).nodes[-1]
        with cache._index.transaction():
            cache._index.remove([cache._index.find(1, doomed.id)])
        (cache.staging("upload-1") / "blob").write_bytes(b"x" * 9000)
    paths[0][1].unlink()
    paths[1][0].write_bytes(b"short")
    # Damaged below what is missing: it goes with that, and is counted once.
    paths[0][2].write_bytes(b"short")
    (paths[0][0].parent / "odd").write_bytes(b"x" * 5000)
    (root / "ns" / "stranger").mkdir()
    before = sorted(path for path in root.rglob("*") if path.name != "index.sqlite-wal")
    real, said = sweep._planned, []

    def planned(reason, **numbers):
        found = sorted(p for p in root.rglob("*") if p.name != "index.sqlite-wal")
        assert found == before, reason
        said.append(reason)
        real(reason, **numbers)

    monkeypatch.setattr(sweep, "_planned", planned)
    removed = []
    with capture_logs() as logs, open_cache(root, removed=removed) as cache:
        check_account(cache, root)
        read_all(cache, ns, find(cache, ns, [2, *TOKENS]).nodes)
    plan = {
        line["reason"]: (line["nodes"], line["files"], line["nbytes"])
        for line in logs
        if line["event"] == "cache_removal_planned"
    }
    assert plan == {
        "upload": (0, 1, 4096 * 4),
        "namespace": (0, 1, 4096),
        "orphan": (0, 1, 8192),
        "unfinished": (0, 1, 4096),
        "missing": (2, 2, 8192),
        "damaged": (3, 3, 4096 * 3),
    }
    assert {gone.reason for gone in removed} == {"missing", "damaged"}
    assert len(removed) == 5


def test_b24_an_idle_start_says_nothing(root):
    with open_cache(root) as cache:
        store(cache, space(cache), TOKENS, ENDS)
    with capture_logs() as logs:
        open_cache(root).close()
    assert not logs


def test_b24_a_start_removes_in_batches(root):
    with open_cache(root, 5 * MIB) as cache:
        ns = space(cache)
        step = cache._index.rows_per_removal
        for number in range(4 * step):
            store(cache, ns, [number, *TOKENS], [300])
    for path in root.glob("ns/*/*"):
        path.unlink()
    told = []
    opening = Opening(
        root=root, cap_bytes=5 * MIB, free_floor=0, on_removed=told.append
    )
    with Cache.open(opening) as cache:
        assert sum(map(len, told)) == 4 * step
        assert max(map(len, told)) <= step
        check_account(cache, root)


def test_b26_a_smaller_cap_evicts_the_oldest_and_only_as_far_as_needed(root):
    size, removed = 100_000, []
    with open_cache(root, 16 * MIB) as cache:
        ns = space(cache)
        for number in range(100):
            store(cache, ns, [number, *TOKENS], [300], size=size)
        assert not cache.stats().total.removed
    with capture_logs() as logs, open_cache(root, 8 * MIB, removed) as cache:
        kept = [position(cache, ns, [n, *TOKENS]) > 0 for n in range(100)]
        # The oldest went, and nothing else.
        assert kept == sorted(kept)
        assert kept.count(False) == len(removed) < 50
        check_account(cache, root)
    [line] = [one for one in logs if one["event"] == "cache_removal_planned"]
    assert line["reason"] == "evicted"
    # What removing them takes in the index's log comes on top.
    assert line["nbytes"] <= len(removed) * 102_400 < line["nbytes"] + 400_000
