"""The writer's queue, its failures, and many threads at once."""

import contextlib
import errno
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import structlog

from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache import writer as module
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.chain import Item
from kvport.snapshot.cache.writer import Writer
from kvport.snapshot.errors import CapacityError, GoneError
from tests.cache.builder import (
    ALL,
    DENSE,
    HYBRID,
    blob_files,
    check_account,
    find,
    noise,
    open_cache,
    position,
    read_all,
    segments,
    space,
    store,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


def test_a_chain_takes_segments_in_order_only(cache, ns):
    one, two, three = segments(ns, TOKENS, ENDS)
    chain = cache.chain(ns, ROOT_NODE, "test")
    with pytest.raises(ValueError, match="must start"):
        chain.append(two)
    chain.append(one)
    with pytest.raises(ValueError, match="must start"):
        chain.append(one)
    with pytest.raises(ValueError, match="tokens"):
        chain.append(attrs.evolve(two, tokens=two.tokens[4:]))
    chain.append(two)
    chain.close()
    chain.close()
    with pytest.raises(ValueError, match="must start"):
        chain.append(three)
    cache.flush()
    assert chain.tip == find(cache, ns, TOKENS).tip
    assert cache.stats().leases == 0


def test_a_chain_cannot_begin_at_what_is_gone(cache, ns):
    tip = store(cache, ns, TOKENS, ENDS)
    cache.report_damage(ns, cache.path(ns, tip)[0].blobs[0])
    with pytest.raises(GoneError):
        cache.chain(ns, tip, "test")
    assert cache.stats().leases == 0


def test_equal_blobs_in_one_batch_are_written_once(cache, ns, root):
    chains = [cache.chain(ns, ROOT_NODE, name) for name in ("a", "b")]
    for pair in zip(*(segments(ns, TOKENS, ENDS) for _ in chains), strict=True):
        for chain, segment in zip(chains, pair, strict=True):
            chain.append(segment)
    cache.flush()
    assert chains[0].tip == chains[1].tip == find(cache, ns, TOKENS).tip
    assert len(blob_files(root)) == 3
    assert cache.stats().total.written == {BlobClass.KV: 3000}
    for chain in chains:
        chain.close()
    cache.flush()
    check_account(cache, root)


def test_empty_and_missing_blobs_can_be_stored(cache, ns, root):
    [segment] = segments(ns, TOKENS, [256])
    chain = cache.chain(ns, ROOT_NODE, "test")
    chain.append(attrs.evolve(segment, blobs={}))
    cache.flush()
    [bare] = find(cache, ns, TOKENS).nodes
    assert bare.blobs == ()
    chain.close()
    chain = cache.chain(ns, ROOT_NODE, "test")
    wide = memoryview(noise(1, 4096)).cast("Q")
    chain.append(attrs.evolve(segment, blobs={BlobClass.KV: [b"", wide]}))
    chain.close()
    cache.flush()
    [node] = cache.path(ns, chain.tip)
    assert read_all(cache, ns, [node]) == [noise(1, 4096)]
    check_account(cache, root)


class Gate:
    """Stands where the store is; lets batches through one by one."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self.batches = []

    def store(self, batch):
        self.batches.append([item.nbytes for item in batch])
        self.entered.release()
        self.leave.acquire()


def test_the_queue_is_bounded_in_bytes_and_one_oversized_item_passes_alone():
    gate = Gate()
    writer = Writer(gate, queue_bytes=100)
    put = []

    def fill():
        for nbytes in (500, 60, 40, 1):
            writer.put(Item(None, None, nbytes))
            put.append(nbytes)

    thread = threading.Thread(target=fill)
    thread.start()
    gate.entered.acquire()
    assert put in ([], [500])  # 60 waits while 500 is being written
    gate.leave.release()
    gate.entered.acquire()
    gate.leave.release(10)
    thread.join()
    writer.flush()
    writer.close()
    assert put == [500, 60, 40, 1]
    assert [n for batch in gate.batches for n in batch] == put
    assert all(sum(batch) <= 100 for batch in gate.batches[1:])


def test_b27_what_is_being_written_is_found_by_a_lookup(cache, ns, monkeypatch):
    real = os.writev

    def slow(fd, parts):
        time.sleep(0.05)
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", slow)
    for number in range(3):
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, [number, *TOKENS], ENDS):
            chain.append(segment)
        chain.close()
        # In flight, and in the index at once or not at all: found, and readable.
        match = find(cache, ns, [number, *TOKENS])
        assert match.position == 700
        assert len(read_all(cache, ns, match.nodes)) == 3


def twelve(cache, ns):
    chains = []
    for number in range(12):
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, [number, *TOKENS], [100], size=100_000):
            chain.append(segment)
        chain.close()
        chains.append(chain)
    return chains


def test_b28_closing_stores_twelve_blocks_through_a_queue_of_four(root):
    cache = open_cache(root)
    cache._writer._queue_bytes = 400_000
    chains = twelve(cache, space(cache))
    cache.close()
    assert all(chain.broken is None for chain in chains)
    with open_cache(root) as cache:
        for number in range(12):
            assert position(cache, space(cache), [number, *TOKENS]) == 100
        check_account(cache, root)


def test_b28_what_a_close_could_not_store_is_counted(root, monkeypatch):
    cache = open_cache(root)
    cache._writer._patience = 0.2
    leave, real = threading.Event(), os.writev

    def hang(fd, parts):
        assert leave.wait(60)
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", hang)
    chains = twelve(cache, space(cache))
    with structlog.testing.capture_logs() as logs:
        cache.close()
    [dropped] = [line for line in logs if line["event"] == "cache_queue_dropped"]
    assert (dropped["segments"], dropped["nbytes"]) == (12, 1_200_000)
    assert cache.stats().total.skipped == {"deadline": 12}
    assert {chain.broken for chain in chains} == {"deadline"}
    leave.set()
    cache._writer._thread.join(20)
    with open_cache(root) as cache:
        check_account(cache, root)


class Slow:
    """Stands where the store is; a volume on which each batch takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.stored = 0

    def store(self, batch):
        time.sleep(self.seconds)
        self.stored += len(batch)


def test_b29_the_deadline_follows_the_bytes_not_a_clock(monkeypatch):
    monkeypatch.setattr(module, "_TICK", 0.1)
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    slow, left = Slow(0.15), []
    writer = Writer(slow, patience=0.4)
    for _ in range(8):
        writer.put(Item(None, None, 100))
    began = time.monotonic()
    assert writer.close(progress=left.append)
    # Three times the patience, and never a batch without progress for so long.
    assert time.monotonic() - began > 1.0
    assert slow.stored == 8
    assert len(left) > 5
    assert left == sorted(left, reverse=True)
    # A large batch gets the time that its bytes take, at the floor rate.
    writer = Writer(Slow(0.5), patience=0.2)
    writer.put(Item(None, None, 3 * module.FLOOR_RATE))
    assert writer.close()
    writer = Writer(Slow(0.5), patience=0.2)
    writer.put(Item(None, None, 100))
    assert not writer.close()


def test_b29_a_kill_in_the_middle_of_the_last_flush_leaves_a_valid_index(root):
    code = (
        "import os, sys, pathlib, time\n"
        "from tests.cache.builder import open_cache, space\n"
        "from tests.cache.test_writer import twelve\n"
        "cache = open_cache(pathlib.Path(sys.argv[1]))\n"
        "cache._writer._queue_bytes = 1 << 30\n"
        "twelve(cache, space(cache))\n"
        "cache.flush()\n"
        "real = os.fsync\n"
        "def slow(fd):\n"
        "    print(flush=True); time.sleep(0.05); return real(fd)\n"
        "os.fsync = slow\n"
        "from tests.cache import builder\n"
        "chain = cache.chain(space(cache), builder.ROOT_NODE, 'test')\n"
        "for one in builder.segments(space(cache), [99, *range(900)], range(1, 800)):\n"
        "    chain.append(one)\n"
        "cache.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE
    ) as child:
        for _ in range(5):
            child.stdout.readline()
        child.kill()
    with open_cache(root) as cache:
        stats = cache.stats()
        assert stats.index_resets == stats.total.damaged == 0
        assert not stats.total.removed
        for number in range(12):
            match = find(cache, space(cache), [number, *TOKENS])
            assert read_all(cache, space(cache), match.nodes)
        check_account(cache, root)


@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_b35_a_failed_save_of_a_block_rolls_back_it_and_all_after_it(
    root, monkeypatch, call, k
):
    cuts = [100, 200, 300, 400, 500]
    with open_cache(root) as cache:
        ns = space(cache)
        chain = cache.chain(ns, ROOT_NODE, "test")
        for number, segment in enumerate(segments(ns, TOKENS, cuts)):
            with monkeypatch.context() as patch:
                if number == k:
                    patch.setattr(os, call, failing(call, errno.EIO, at=1))
                chain.append(segment)
                cache.flush()
        chain.close()
        cache.flush()
        assert chain.broken == "storage"
        assert cache.stats().total.skipped == {"storage": len(cuts) - k}
        assert position(cache, ns, TOKENS) == 100 * k
        assert len(blob_files(root)) == k
        check_account(cache, root)
        store(cache, ns, TOKENS, cuts)
        assert position(cache, ns, TOKENS) == 500
        check_account(cache, root)


def test_closing_stores_what_is_queued(root):
    with open_cache(root) as cache:
        ns = space(cache)
        chain = cache.chain(ns, ROOT_NODE, "test")
        one, two, three = segments(ns, TOKENS, ENDS)
        chain.append(one)
        chain.append(two)
    chain.append(three)
    assert chain.broken == "closed"
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == 512


def failing(call, number, at):
    """The real call, but the `at`th time it fails."""
    real, calls = getattr(os, call), []

    def run(*args, **kwargs):
        calls.append(call)
        if len(calls) == at:
            raise OSError(number, "injected")
        return real(*args, **kwargs)

    return run


@pytest.mark.parametrize("fault", [(errno.ENOSPC, "disk_full"), (errno.EIO, "storage")])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_volume_that_fails_leaves_nothing_of_the_batch(
    root, monkeypatch, call, fault
):
    with open_cache(root) as cache:
        tip = store(cache, space(cache), TOKENS, ENDS)
        # In use: nothing of ours could make room.
        with cache.lease(space(cache), tip, "test"):
            fail_in_a_batch(cache, root, monkeypatch, call, fault)


def fail_in_a_batch(cache, root, monkeypatch, call, fault):
    ns = space(cache)
    before = blob_files(root)
    number, reason = fault
    chain = cache.chain(ns, ROOT_NODE, "test")
    batch = [
        Item(chain, segment, segment.nbytes)
        for segment in segments(ns, [7, *TOKENS], ENDS)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(call, number, at=2))
        cache._writer._store.store(batch)
    assert chain.broken == reason
    assert chain.tip == ROOT_NODE
    assert cache.stats().total.skipped == {reason: 3}
    assert blob_files(root) == before
    check_account(cache, root)
    tip = store(cache, ns, [7, *TOKENS], ENDS)
    assert find(cache, ns, [7, *TOKENS]).tip == tip
    check_account(cache, root)
    chain.close()


@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_volume_full_of_old_state_is_no_reason_to_stop(root, monkeypatch, call):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS, size=2 * MIB)
        chain = cache.chain(ns, ROOT_NODE, "test")
        batch = [
            Item(chain, segment, segment.nbytes)
            for segment in segments(ns, [7, *TOKENS], ENDS)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(call, errno.ENOSPC, at=2))
            cache._writer._store.store(batch)
        assert chain.broken is None
        chain.close()
        cache.flush()
        read_all(cache, ns, find(cache, ns, [7, *TOKENS]).nodes)
        # About as much as was needed, and a reserve: not all.
        assert cache.stats().total.removed == {"evicted": 2}
        assert position(cache, ns, TOKENS) == 256
        check_account(cache, root)


def test_a_callback_that_fails_does_not_end_the_writer(root):
    def failing(_removed):
        raise RuntimeError("a defect elsewhere")

    opening = Opening(root=root, cap_bytes=4 * MIB, free_floor=0, on_removed=failing)
    with Cache.open(opening) as cache:
        ns = space(cache)
        for number in range(20):
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, [number, *TOKENS], [100], size=400_000):
                chain.append(segment)
            chain.close()
        cache.flush()
        assert cache.stats().leases == 0
        check_account(cache, root)


def use_as_a_client(cache, spaces, seed):
    rng = random.Random(seed)
    for _ in range(15):
        ns = rng.choice(spaces)
        tokens = [rng.randrange(6), *TOKENS]
        match = find(cache, ns, tokens)
        base, tip = (match.base, match.tip) if match else (0, ROOT_NODE)
        try:
            if match is not None:
                with cache.lease(ns, match.nodes[-1].id, "client"):
                    read_all(cache, ns, match.nodes)
            chain = cache.chain(ns, tip, "client")
        except GoneError:
            continue
        size, variant = rng.choice([500, 90_000, 200_000]), rng.randrange(3)
        ends = [end for end in ENDS if end > base]
        for segment in segments(
            ns, tokens, ends, start=base, variant=variant, size=size
        ):
            chain.append(segment)
        chain.close()


def use_as_an_importer(cache):
    for _ in range(40):
        with contextlib.suppress(CapacityError), cache.reserve(MIB):
            pass


def test_many_threads_at_a_tiny_cap(root):
    cap = 6 * MIB
    over, done = [], threading.Event()
    with open_cache(root, cap) as cache, ThreadPoolExecutor(6) as pool:
        spaces = [space(cache, layout) for layout in (DENSE, HYBRID, ALL)]

        def watch():
            while not done.wait(0.001):
                account = cache._account.numbers
                if account.reserved > account.cap:
                    over.append(account)

        watching = pool.submit(watch)
        users = [pool.submit(use_as_a_client, cache, spaces, n) for n in range(4)]
        users.append(pool.submit(use_as_an_importer, cache))
        try:
            for user in users:
                user.result()
        finally:
            done.set()
        watching.result()
        cache.flush()
        assert not over
        stats = cache.stats()
        assert stats.total.damaged == 0
        assert stats.leases == 0
        assert stats.total.removed["evicted"] > 0
        assert "internal" not in stats.total.skipped
        check_account(cache, root)
    with open_cache(root, cap) as cache:
        assert not cache.stats().total.removed
        check_account(cache, root)
