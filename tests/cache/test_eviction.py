"""One hard cap: what goes to make room, in which order, and what stays."""

import os
import random

import pytest

from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.chain import Item
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import CapacityError, GoneError
from tests.cache.builder import (
    HYBRID,
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    read_or_lose,
    segments,
    space,
    store,
    walk,
)

BIG = 410_000
"""Bytes of a blob; with a cap of 6 MiB about ten fit."""
CAP = 6 * MIB


def prompt(number: int, length: int = 512) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def test_the_cap_holds_at_every_step_and_paths_keep_their_heads(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        spaces = [space(cache), space(cache, HYBRID), space(cache, scope="b")]
        rng = random.Random(5)
        for number in range(40):
            ns = rng.choice(spaces)
            size = rng.choice([1000, 60_000, BIG])
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, prompt(number), [100, 256, 400], size=size):
                chain.append(segment)
                cache.flush()
                assert walk(root) <= cache.stats().account.reserved <= CAP
            chain.close()
            cache.flush()
            check_account(cache, root)
            for other in range(number + 1):
                for each in spaces:
                    if (match := find(cache, each, prompt(other))) is not None:
                        assert match.nodes[0].start == 0
                        assert read_all(cache, each, match.nodes)
        assert {gone.reason for gone in removed} == {RemovalReason.EVICTED}
        stats = cache.stats()
        assert stats.total.removed[RemovalReason.EVICTED] == len(removed) > 40
        assert stats.total.damaged == 0
        assert sum(n.nodes for n in stats.namespaces) + len(removed) == 40 * 3
        assert len(blob_files(root)) == sum(n.files for n in stats.namespaces)


def test_a_path_goes_from_its_end(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100, 200, 300, 400], size=BIG)
        number = 2
        while not removed:
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        assert [gone.end for gone in removed] == [400]
        assert position(cache, ns, prompt(1)) == 300


def test_reads_renew_what_they_read(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        for number in (1, 2):
            store(cache, ns, prompt(number), [100], size=BIG)
        read = find(cache, ns, prompt(1)[:100])
        number = 3
        while not removed:
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        assert find(cache, ns, prompt(2)) is None
        assert find(cache, ns, prompt(1)).nodes == read.nodes


def test_recency_of_reads_outlives_a_restart(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        for number in (1, 2):
            store(cache, ns, prompt(number), [100], size=BIG)
        find(cache, ns, prompt(1))
    removed = []
    with open_cache(root, CAP, removed) as cache:
        number = 3
        while not removed:
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        assert find(cache, ns, prompt(2)) is None
        assert find(cache, ns, prompt(1)) is not None


def test_reading_a_long_path_keeps_its_head_from_going_first(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100, 200, 300], size=BIG)
        store(cache, ns, prompt(2), [100, 200, 300], size=BIG)
        find(cache, ns, prompt(1))
        number = 3
        while len(removed) < 3:
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        assert position(cache, ns, prompt(1)) == 300
        assert find(cache, ns, prompt(2)) is None


def test_a_node_that_becomes_a_leaf_is_as_recent_as_what_hung_on_it(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        for number in (1, 2):
            store(cache, ns, prompt(number), [100, 200], size=BIG)
        match = find(cache, ns, prompt(1))
        cache.report_damage(ns, match.nodes[-1].blobs[0])
        removed.clear()
        number = 3
        while len(removed) < 2:
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        assert find(cache, ns, prompt(2)) is None
        assert position(cache, ns, prompt(1)) == 100


def test_leased_state_and_its_ancestors_stay(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(1), [100, 200, 300], size=BIG)
        held = cache.path(ns, tip)
        with cache.lease(ns, held[1].id, "test") as lease:
            for number in range(2, 30):
                store(cache, ns, prompt(number), [100], size=BIG)
            assert cache.path(ns, held[1].id) == held[:2]
            with pytest.raises(GoneError):
                cache.path(ns, tip)
            lease.move(held[0].id)
            with pytest.raises(GoneError):
                lease.move(tip)
            assert lease.tip == held[0].id
            for number in range(30, 60):
                store(cache, ns, prompt(number), [100], size=BIG)
            assert position(cache, ns, prompt(1)) == 100
        assert cache.stats().leases == 0
        for number in range(60, 90):
            store(cache, ns, prompt(number), [100], size=BIG)
        assert find(cache, ns, prompt(1)) is None
        with pytest.raises(GoneError):
            cache.lease(ns, held[0].id, "too late")


def test_a_growing_chain_is_leased_and_breaks_when_nothing_else_can_go(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100], size=BIG)
        chain = cache.chain(ns, ROOT_NODE, "test")
        ends = list(range(10, 500, 10))
        for segment in segments(ns, prompt(2), ends, size=BIG):
            chain.append(segment)
        cache.flush()
        assert chain.broken == "capacity"
        kept = position(cache, ns, prompt(2))
        assert kept == cache.path(ns, chain.tip)[-1].end
        assert cache.stats().total.skipped == {"capacity": len(ends) - kept // 10}
        assert find(cache, ns, prompt(1)) is None
        assert walk(root) <= cache.stats().account.reserved <= CAP
        chain.close()
        # The next one has its place.
        store(cache, ns, prompt(3), [100], size=BIG)
        check_account(cache, root)


def test_a_chain_that_ended_before_makes_room_within_its_batch(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        old = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, prompt(1), range(10, 500, 10), size=BIG):
            old.append(segment)
        cache.flush()
        assert old.broken == "capacity"
        new = cache.chain(ns, ROOT_NODE, "test")
        [segment] = segments(ns, prompt(2), [100], size=BIG)
        items = [Item(old, None, 0), Item(new, segment, segment.nbytes)]
        cache._writer._store.store(items)
        assert new.broken is None
        new.close()
        cache.flush()
        check_account(cache, root)


def test_what_can_never_fit_evicts_nothing(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(1), [100, 200], size=BIG)
        with pytest.raises(CapacityError):
            cache.reserve(CAP)
        chain = cache.chain(ns, tip, "test")
        for segment in segments(ns, prompt(1), [300], start=200, size=CAP):
            chain.append(segment)
        cache.flush()
        assert chain.broken == "capacity"
        assert not removed
        assert position(cache, ns, prompt(1)) == 200


def test_a_reservation_evicts_and_is_given_back(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        for number in range(12):
            store(cache, ns, prompt(number), [100], size=BIG)
        with cache.reserve(3 * MIB, files=10) as reservation:
            account = cache.stats().account
            assert account.held == reservation.remaining >= 3 * MIB
            assert walk(root) + account.held <= account.reserved <= CAP
        reservation.release()
        check_account(cache, root)


def test_a_smaller_cap_is_met_at_start(root):
    with open_cache(root, 16 * MIB) as cache:
        ns = space(cache)
        for number in range(20):
            store(cache, ns, prompt(number), [100, 200], size=BIG)
        assert walk(root) > CAP
    removed = []
    with open_cache(root, CAP, removed) as cache:
        check_account(cache, root)
        assert removed
        ns = space(cache)
        assert position(cache, ns, prompt(19)) == 200
        assert find(cache, ns, prompt(0)) is None


def test_a_cap_that_holds_nothing_is_refused(root):
    with pytest.raises(CapacityError):
        open_cache(root, MIB)
    with open_cache(root, CAP):
        pass


def test_the_automatic_cap_is_half_of_free_and_ours(root):
    with open_cache(root, None) as cache:
        assert cache.stats().account.cap > 64 * MIB


def test_room_for_one_segment_may_cost_a_blob_that_another_shares(root, monkeypatch):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        [first] = segments(ns, prompt(1), [100], size=BIG)
        store(cache, ns, prompt(1), [100], size=BIG)
        number = 2
        while not cache.stats().total.removed:
            find(cache, ns, prompt(1))
            store(cache, ns, prompt(number), [100], size=BIG)
            number += 1
        for other in range(2, number):
            find(cache, ns, prompt(other))
        # prompt(1) is the oldest now. It is stored again, so nothing is to be written,
        # but what comes after it in the batch takes its place.
        [second] = segments(ns, prompt(100), [100], size=3 * BIG)
        written = cache.stats().total.written[BlobClass.KV]
        chains = [cache.chain(ns, ROOT_NODE, name) for name in ("first", "second")]
        batch = [
            Item(chain, segment, segment.nbytes)
            for chain, segment in zip(chains, (first, second), strict=True)
        ]
        real = os.fsync

        def flush(fd):
            assert walk(root) <= cache.stats().account.reserved <= CAP
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", flush)
            cache._writer._store.store(batch)
        assert cache.stats().total.written[BlobClass.KV] == written + 4 * BIG
        for chain in chains:
            assert chain.broken is None
            read_all(cache, ns, cache.path(ns, chain.tip))
            chain.close()
        cache.flush()
        check_account(cache, root)


def test_a_shared_blob_stays_for_its_other_owner(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        tokens = prompt(1)
        one = store(cache, ns, tokens, [100], size=BIG)
        # The same bytes at the same place, below another parent.
        [segment] = segments(ns, tokens, [100], size=BIG)
        [other] = segments(ns, tokens, [50], size=BIG)
        chain = cache.chain(ns, ROOT_NODE, "test")
        chain.append(other)
        [rest] = segments(ns, tokens, [100], start=50, size=BIG)
        chain.append(rest)
        chain.close()
        cache.flush()
        assert segment.blobs.keys() == rest.blobs.keys()
        assert len(blob_files(root)) == 2
        with cache.lease(ns, chain.tip, "test"):
            for number in range(2, 30):
                store(cache, ns, prompt(number), [100], size=BIG)
            with pytest.raises(GoneError):
                cache.path(ns, one)
            assert read_or_lose(cache, ns, cache.path(ns, chain.tip))
            check_account(cache, root)
