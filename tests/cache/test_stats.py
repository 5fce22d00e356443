"""Numbers that are true: rows sum to the total, and the total is a walk of the root."""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.schema import class_of
from kvport.snapshot.cache.stats import Counted, Counters, SkipReason
from kvport.snapshot.errors import DamagedError, StorageError
from tests.cache.builder import (
    ALL,
    BLOCK,
    DENSE,
    HYBRID,
    check_account,
    find,
    identity_of,
    open_cache,
    read_all,
    segments,
    select,
    space,
    store,
    walk,
    with_tokens,
)

CUTS = (100, 200, 300)


def prompt(seed, length=300):
    return [seed * 1000 + n for n in range(length)]


def kinds_on_disk(cache, root):
    """Files and allocated bytes by namespace and class, by the files themselves."""
    classes = {
        (ns, digest.hex()): class_of(number)
        for ns, digest, number in cache._index.all(
            "SELECT ns.id, digest, class FROM file JOIN ns ON ns.n = file.ns"
        )
    }
    files, nbytes = Counter(), Counter()
    for path in root.glob("ns/*/*"):
        key = path.parent.name, classes[path.parent.name, path.name]
        files[key] += 1
        nbytes[key] += path.lstat().st_blocks * 512
    return files, nbytes


def check_numbers(cache, root):
    """All numbers against the disk and the rows, while nothing is going on."""
    check_account(cache, root)
    stats = cache.stats()
    assert stats.total_bytes == walk(root)
    rows = sum(one.nbytes for one in stats.namespaces)
    assert rows + sum(stats.beside.values()) == stats.total_bytes
    assert stats.beside["orphans"] == stats.beside["held"] == 0
    files, nbytes = kinds_on_disk(cache, root)
    for one in stats.namespaces:
        for kind in BlobClass:
            held = one.kinds.get(kind)
            assert (held.files if held else 0) == files[one.id, kind]
            assert (held.nbytes if held else 0) == nbytes[one.id, kind]
        ((nodes, tokens),) = cache._index.all(
            'SELECT count(*), total("end" - start) FROM node WHERE ns ='
            " (SELECT n FROM ns WHERE id = ?)",
            (one.id,),
        )
        assert (one.nodes, one.tokens) == (nodes, tokens)
    return stats


def test_b20_the_gauge_is_a_walk_of_the_whole_root_by_kind(root):
    with open_cache(root) as cache:
        ns = space(cache, ALL)
        store(cache, ns, prompt(1), CUTS, size=9000)
        path = cache.staging("upload")
        with cache.reserve(50_000):
            (path / "blob").write_bytes(os.urandom(50_000))
            stats = cache.stats()
            assert stats.staging == (path / "blob").stat().st_blocks * 512
            assert stats.beside["staging"] + stats.beside["held"] == stats.account.held
            assert stats.total_bytes >= walk(root)
            cache.discard_staging("upload")
        stats = check_numbers(cache, root)
        [one] = stats.namespaces
        assert {kind: held.files for kind, held in one.kinds.items()} == {
            BlobClass.KV: 3,
            BlobClass.WINDOW: 3,
            BlobClass.STATE: 3,
        }
        assert all(held.nbytes == 3 * 12288 for held in one.kinds.values())
        index = sum(f.stat().st_blocks * 512 for f in root.glob("index.sqlite*"))
        assert stats.beside["index"] == index


def test_b21_removed_state_leaves_the_gauge_at_once(root):
    with open_cache(root) as cache:
        ns = space(cache, ALL)
        store(cache, ns, prompt(1), CUTS)
        row = cache._index.namespace_row(ns.id)
        roots = [n for (n,) in cache._index.all("SELECT n FROM node WHERE parent = 0")]
        cache._evictor.remove(row, roots, RemovalReason.CLEARED)
        stats = check_numbers(cache, root)
        [one] = stats.namespaces
        assert (one.nodes, one.tokens, one.files, one.nbytes) == (0, 0, 0, 0)
        assert one.kinds == {}
        assert one.counted.removed == {"cleared": 3}


def test_b22_no_model_shows_the_shared_total(root):
    with open_cache(root) as cache:
        large, small = space(cache, DENSE), space(cache, HYBRID)
        store(cache, large, prompt(1), CUTS, size=100_000)
        store(cache, small, prompt(2), CUTS[:1], size=5000)
        stats = check_numbers(cache, root)
        rows = {one.id: one for one in stats.namespaces}
        assert rows[large.id].nbytes == 3 * 102_400
        assert rows[small.id].nbytes == 2 * 8192
        assert rows[large.id].tokens == 300
        assert rows[small.id].tokens == 100
        assert all(one.nbytes < stats.total_bytes for one in stats.namespaces)
        assert rows[large.id].counted.written_bytes == 300_000
        assert rows[small.id].counted.written_bytes == 10_000
        assert stats.total.written_bytes == 310_000
        assert stats.total.written == {BlobClass.KV: 305_000, BlobClass.STATE: 5000}


def test_numbers_are_true_through_evictions_prunings_and_reopening(root):
    with open_cache(root, 5 * MIB) as cache:
        one, other = space(cache, HYBRID), space(cache, ALL)
        keep = Retention()
        for turn in range(30):
            ns = (one, other)[turn % 3 == 0]
            store(cache, ns, prompt(turn), CUTS, size=60_000, retention=keep)
            if turn % 5 == 0:
                check_numbers(cache, root)
        stats = check_numbers(cache, root)
        # Without their points the rows are of no use, and go first.
        evicted = [n.counted.removed[RemovalReason.POINTLESS] for n in stats.namespaces]
        assert all(evicted)
        assert sum(evicted) == stats.total.removed[RemovalReason.POINTLESS]
        assert stats.total.removed.keys() == {RemovalReason.POINTLESS}
        assert sum(n.nodes for n in stats.namespaces) + sum(evicted) == 90
        assert stats.total.pruned, "points without a kind are not kept"
        assert stats.total.pruned_blobs.total() == sum(
            n.counted.pruned_blobs.total() for n in stats.namespaces
        )
    with open_cache(root, 5 * MIB) as cache:
        again = check_numbers(cache, root)
        assert [(n.id, n.nodes, n.tokens, n.kinds) for n in again.namespaces] == [
            (n.id, n.nodes, n.tokens, n.kinds) for n in stats.namespaces
        ]
        assert again.total == Counted()


def test_numbers_are_true_after_an_admission(root, tmp_path):
    with open_cache(tmp_path / "there") as there:
        ns = space(there, ALL)
        tip = store(there, ns, prompt(1), CUTS)
        nodes = with_tokens(there.path(ns, tip), encode_tokens(prompt(1)))
        blobs = {
            ref.digest: bytes(there.read(ns, ref)) for n in nodes for ref in n.blobs
        }
    with open_cache(root) as cache:
        ns = space(cache, ALL)
        staging = cache.staging("upload")
        with cache.reserve(1 << 20, files=len(blobs)) as reservation:
            staged = {}
            for digest, data in blobs.items():
                staged[digest] = staging / digest.hex()
                staged[digest].write_bytes(data)
            cache.admit(ns, nodes, staged, reservation)
            cache.discard_staging("upload")
        stats = check_numbers(cache, root)
        [one] = stats.namespaces
        assert (one.nodes, one.tokens, one.files) == (3, 300, 9)
        assert one.counted == Counted(), "it was neither captured nor written here"


def test_a_commit_that_is_undone_leaves_no_trace_in_the_numbers(root, monkeypatch):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), CUTS)
        before = check_numbers(cache, root)

        def refuse(*_):
            raise StorageError("the index could not be written")

        with monkeypatch.context() as patch:
            # After the files' rows, in the same transaction.
            patch.setattr(Index, "add_node", refuse)
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, prompt(2), CUTS):
                chain.append(segment)
            chain.close()
            cache.flush()
        after = check_numbers(cache, root)
        assert [n.kinds for n in after.namespaces] == [
            n.kinds for n in before.namespaces
        ]
        assert after.total.written == before.total.written
        assert after.total.skipped == {SkipReason.STORAGE: 3}


def test_lookups_of_requests_are_hits_and_misses_and_others_are_neither(root):
    with open_cache(root) as cache:
        ns, other = space(cache), space(cache, HYBRID)
        store(cache, ns, prompt(1), CUTS)
        assert find(cache, ns, prompt(1)).position == 300
        assert find(cache, ns, prompt(1)).position == 300
        assert find(cache, ns, prompt(2)) is None
        assert find(cache, other, prompt(1)) is None
        assert cache.match(ns, encode_tokens(prompt(1)), select(), count=False)
        cache.longest(ns, encode_tokens(prompt(1)))
        cache.note_restored(ns, 300)
        rows = {one.id: one.counted for one in cache.stats().namespaces}
        mine, others = rows[ns.id], rows[other.id]
        assert (mine.hits, mine.misses, mine.restored_tokens) == (2, 1, 300)
        assert (others.hits, others.misses, others.restored_tokens) == (0, 1, 0)
        assert mine.written_per_restored_token == pytest.approx(3000 / 300)
        assert mine.written_per_captured_token == pytest.approx(3000 / 300)
        assert others.written_per_restored_token is None
        assert time.time() - 60 < mine.last_use <= time.time()
        assert others.last_use is None


def test_damage_is_counted_where_it_was(root):
    with open_cache(root) as cache:
        ns, other = space(cache), space(cache, HYBRID)
        store(cache, ns, prompt(1), CUTS)
        tip = store(cache, other, prompt(1), CUTS)
        nodes = cache.path(other, tip)
        blob = root / "ns" / other.id / nodes[1].blobs[0].digest.hex()
        data = bytearray(blob.read_bytes())
        data[5] ^= 1
        blob.write_bytes(data)
        with pytest.raises(DamagedError):
            read_all(cache, other, nodes)
        rows = {one.id: one.counted for one in check_numbers(cache, root).namespaces}
        assert (rows[ns.id].damaged, rows[other.id].damaged) == (0, 1)
        assert rows[ns.id].removed == {}
        assert rows[other.id].removed == {RemovalReason.DAMAGED: 2}


def test_a_directory_that_was_removed_by_hand_is_counted_and_leaves_the_gauge(root):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), CUTS)
        shutil.rmtree(root / "ns" / ns.id)
        store(cache, ns, prompt(2), CUTS)
        stats = check_numbers(cache, root)
        assert stats.total.removed == {RemovalReason.MISSING: 3}
        assert [one.files for one in stats.namespaces] == [3]


@contextlib.contextmanager
def storing(cache, spaces):
    """A thread for each namespace that stores and restores; answers when they end."""
    ending = threading.Event()

    def work(number, ns):
        for seed in itertools.count(number, len(spaces)):
            store(cache, ns, prompt(seed), CUTS, size=60_000)
            find(cache, ns, prompt(seed))
            if ending.is_set():
                return

    with ThreadPoolExecutor(len(spaces)) as workers:
        futures = [workers.submit(work, *args) for args in enumerate(spaces)]
        try:
            yield
        finally:
            ending.set()
    for future in futures:
        future.result()


def check_reading(stats, blobs):
    """What must hold at any moment, given the blobs of each namespace's segments."""
    # Nothing is double, and nothing is between two places.
    assert stats.beside["orphans"] == 0
    assert min(stats.beside.values()) >= 0
    rows = sum(one.nbytes for one in stats.namespaces)
    assert rows + sum(stats.beside.values()) == stats.total_bytes
    assert stats.total_bytes <= stats.account.cap
    for one in stats.namespaces:
        counted = one.counted
        # What was removed is counted once its files are unlinked.
        assert (
            0 <= one.tokens <= counted.captured_tokens - 100 * counted.removed.total()
        )
        segments_brought = counted.captured_tokens // 100
        assert counted.written_bytes == segments_brought * blobs[one.id] * 60_000


def test_readings_agree_while_others_store_and_evict(root, monkeypatch):
    with open_cache(root, 5 * MIB) as cache:
        spaces = [space(cache, layout) for layout in (DENSE, HYBRID)]
        spaces += [cache.namespace(identity_of(ALL, n), "x", BLOCK) for n in (1, 2)]
        blobs = {ns.id: len(ns.layout.blob_classes) for ns in spaces}
        change = cache._account.change

        def slow_change(**parts):
            # Between a commit and the account, where a reading must not fall.
            if parts.get("blobs"):
                time.sleep(0.001)
            change(**parts)

        with monkeypatch.context() as patch, storing(cache, spaces):
            patch.setattr(cache._account, "change", slow_change)
            deadline = time.monotonic() + 2
            last = cache.stats()
            while time.monotonic() < deadline or not last.total.removed:
                stats = cache.stats()
                check_reading(stats, blobs)
                assert stats.total.hits >= last.total.hits
                assert stats.total.written_bytes >= last.total.written_bytes
                last = stats
        stats = check_numbers(cache, root)
        assert set(stats.total.removed) == {RemovalReason.EVICTED}
        stored = sum(one.tokens for one in stats.namespaces)
        removed = 100 * stats.total.removed.total()
        assert stats.total.captured_tokens == stored + removed


def test_a_reading_does_not_look_at_every_row(root):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), CUTS)
        steps = 0

        def count():
            nonlocal steps
            steps += 1

        def steps_of_a_reading():
            nonlocal steps
            steps = 0
            cache._index._connection.set_progress_handler(count, 1)
            cache.stats()
            cache._index._connection.set_progress_handler(None, 1)
            return steps

        few = steps_of_a_reading()
        for seed in range(2, 40):
            store(cache, ns, prompt(seed), CUTS)
        assert steps_of_a_reading() == few > 0


def test_counts_of_a_namespace_that_is_gone_stay_in_the_total():
    counters = Counters()
    counters.add_lookup("a", hit=True)
    counters.add_restored("a", 7)
    counters.add_skipped("b", SkipReason.QUOTA)
    counted = counters.counted()
    counters.add_restored("a", 5)
    assert counted["a"].restored_tokens == 7, "a copy"
    total = Counted.total(counted.values())
    assert (total.hits, total.restored_tokens) == (1, 7)
    assert total.skipped == {SkipReason.QUOTA: 1}
