"""Clearing: by namespace, class, age and path; what is held stays, and is said to."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import GoneError
from tests.cache.builder import (
    ALL,
    HYBRID,
    blob_files,
    check_account,
    evict_all,
    find,
    identity_of,
    open_cache,
    position,
    segments,
    space,
    store,
    walk,
)

TOKENS = list(range(600))
CUTS = [200, 400, 600]


def other(number):
    return [1_000_000 + number, *TOKENS[1:]]


def test_b21_clear_with_nothing_loaded_removes_all_kinds(root):
    """With no model loaded, not only KV blocks go; the gauge is right at once."""
    with open_cache(root) as cache:
        for scope in ("a", "b"):
            for number in range(20):
                ns = space(cache, ALL, scope)
                store(cache, ns, other(number), CUTS, variant=number, size=10_000)
    removed = []
    with open_cache(root, removed=removed) as cache:
        before, blobs = walk(root), cache.stats().account.blobs
        cleared = cache.administration.clear()
        stats = cache.stats()
        assert stats.account.blobs == 0
        assert all(not (ns.nodes or ns.files or ns.nbytes) for ns in stats.namespaces)
        assert not blob_files(root)
        assert cleared.freed_bytes == blobs >= 2 * 20 * 9 * 10_000
        assert before - walk(root) >= cleared.freed_bytes - 2 * stats.account.index
        assert (cleared.removed_segments, cleared.kept) == (120, {})
        assert stats.total.removed == {RemovalReason.CLEARED: 120}
        assert len(removed) == 120
        check_account(cache, root)
        assert cache.administration.clear().freed_bytes == 0


@pytest.mark.parametrize("blob_class", [BlobClass.STATE, BlobClass.WINDOW])
def test_b71_clear_by_kind_counts_what_went_and_lookups_miss(cache, root, blob_class):
    """Not 'done' with nothing gone: counts and bytes are what the disk says."""
    ns = space(cache, ALL)
    for number in range(30):
        store(cache, ns, other(number), CUTS, variant=number, size=5000)
    tip = store(cache, ns, TOKENS, CUTS, size=5000)
    with cache.lease(ns, tip, "reader"):
        before = cache.stats()
        cleared = cache.administration.clear(classes={blob_class})
        after = cache.stats()
        assert cleared.dropped_blobs == 90
        assert cleared.removed_segments == 0
        assert cleared.kept == {"leased": 3}
        assert cleared.freed_bytes == before.account.blobs - after.account.blobs
        assert cleared.freed_bytes >= 90 * 5000
        assert after.namespaces[0].kinds[blob_class].files == 3
        assert after.namespaces[0].kinds[BlobClass.KV].files == 93
        assert position(cache, ns, TOKENS) == 600
    assert all(position(cache, ns, other(number)) == 0 for number in range(30))
    assert cache.administration.clear(classes={blob_class}).dropped_blobs == 3
    assert position(cache, ns, TOKENS) == 0
    check_account(cache, root)


def test_kv_is_all_of_a_node(cache, root):
    ns = space(cache, HYBRID)
    store(cache, ns, TOKENS, CUTS)
    cleared = cache.administration.clear(classes={BlobClass.KV})
    assert (cleared.removed_segments, cleared.dropped_blobs) == (3, 0)
    assert not blob_files(root)
    check_account(cache, root)


def test_b19_one_deployment_goes_and_nothing_else_and_unloading_keeps_it(root):
    """Deleted: all of its directories, in every scope; others stay as they are."""
    with open_cache(root) as cache:
        gone = [
            cache.namespace(identity_of(ALL, model=1), scope, 256)
            for scope in ("rank 0", "rank 1")
        ]
        stays = cache.namespace(identity_of(ALL, model=2), "rank 0", 256)
        for ns in (*gone, stays):
            for number in range(10):
                store(cache, ns, other(number), CUTS, variant=number)
    with open_cache(root) as cache:  # unloaded, and loaded again
        assert all(position(cache, ns, other(3)) == 600 for ns in (*gone, stays))
        cleared = cache.administration.clear([ns.id for ns in gone])
        assert cleared.removed_segments == 60
        for ns in gone:
            assert not list((root / "ns" / ns.id).iterdir())
            assert position(cache, ns, other(3)) == 0
        assert all(position(cache, stays, other(n)) == 600 for n in range(10))
        assert len(list((root / "ns" / stays.id).iterdir())) == 90
        check_account(cache, root)
        with pytest.raises(GoneError):
            cache.administration.clear([stays.id, "00" * 32])
        assert position(cache, stays, other(3)) == 600


def test_by_age_what_was_used_lately_stays_with_its_path(cache, ns, root, time):
    for number in range(3):
        store(cache, ns, other(number), CUTS, variant=number)
        time.passes(100)
    assert position(cache, ns, other(0), limit=400) == 400  # read just now
    cleared = cache.administration.clear(older_than=150)
    assert cleared.removed_segments == 1 + 3
    assert [position(cache, ns, other(n)) for n in range(3)] == [400, 0, 600]
    time.passes(1000)
    assert cache.administration.clear(older_than=1001).removed_segments == 0
    assert cache.administration.clear(older_than=1000).removed_segments == 5
    check_account(cache, root)


def test_the_use_of_a_path_s_end_counts_for_the_path_when_the_end_has_gone(
    cache, ns, root, time
):
    tip = store(cache, ns, TOKENS, CUTS)
    time.passes(100)
    assert position(cache, ns, TOKENS) == 600
    with cache.lease(ns, cache.path(ns, tip)[1].id, "reader"):
        evict_all(cache)
    assert cache.administration.clear(older_than=1).removed_segments == 0
    assert position(cache, ns, TOKENS) == 400
    check_account(cache, root)


def test_by_age_and_kind_a_point_above_one_in_use_stays(cache, root, time):
    ns = space(cache, HYBRID)
    store(cache, ns, TOKENS, CUTS)
    branch = [*TOKENS[:200], *range(1000, 1200)]
    base = find(cache, ns, TOKENS, limit=200).tip
    store(cache, ns, branch, [400], tip=base, start=200)
    time.passes(100)
    assert position(cache, ns, branch) == 400
    cleared = cache.administration.clear(classes={BlobClass.STATE}, older_than=100)
    assert cleared.dropped_blobs == 2
    assert position(cache, ns, branch) == 400
    assert position(cache, ns, TOKENS) == 200
    check_account(cache, root)


def test_an_artifact_goes_as_far_as_no_other_path_needs_it(cache, ns, root):
    cuts = range(2, 601, 2)
    tip = store(cache, ns, TOKENS, cuts)
    base = find(cache, ns, TOKENS, limit=100).tip
    branch = [*TOKENS[:100], *range(1000, 1200)]
    other_tip = store(cache, ns, branch, [300], tip=base, start=100)
    for node in (base, ROOT_NODE):
        cleared = cache.administration.clear(nodes=[node])
        shared = {"shared": 50} if node == base else {}
        assert (cleared.removed_segments, cleared.kept) == (0, shared)
    cleared = cache.administration.clear(nodes=[tip])
    assert cleared.removed_segments == 250
    assert position(cache, ns, TOKENS) == 100
    assert position(cache, ns, branch) == 300
    with cache.lease(ns, base, "reader"):
        cleared = cache.administration.clear(nodes=[other_tip])
        assert (cleared.removed_segments, cleared.kept) == (1, {"leased": 50})
    assert cache.administration.clear(nodes=[base, tip]).removed_segments == 50
    assert not blob_files(root)
    check_account(cache, root)
    with pytest.raises(ValueError, match="whole"):
        cache.administration.clear(nodes=[tip], classes={BlobClass.STATE})


def test_an_artifact_that_goes_meanwhile_is_no_error(cache, ns, root):
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            tip = store(cache, ns, TOKENS, CUTS)
            orders = [
                pool.submit(cache.administration.clear, nodes=[tip]) for _ in range(4)
            ]
            assert sum(one.result().removed_segments for one in orders) == len(CUTS)
    check_account(cache, root)


def test_both_reasons_are_told_apart_and_force_overrules_them(cache, ns, root):
    leased = store(cache, ns, TOKENS, CUTS)
    pinned = store(cache, ns, other(1), CUTS, variant=1)
    store(cache, ns, other(2), CUTS, variant=2)
    cache.administration.pin(ns.id, pinned, "a", 60)
    cache.administration.pin(ns.id, cache.path(ns, leased)[0].id, "a", 60)
    chain = cache.chain(ns, leased, "request")
    cleared = cache.administration.clear()
    assert cleared.removed_segments == 3
    assert cleared.kept == {"leased": 3, "pinned": 3}
    forced = cache.administration.clear(force=True)
    assert (forced.removed_segments, forced.kept) == (6, {})
    # The running request stores nothing more, and says why.
    [segment] = segments(ns, [*TOKENS, 1], [601], start=600)
    chain.append(segment)
    chain.close()
    cache.flush()
    assert chain.broken == "gone"
    check_account(cache, root)


def test_clearing_while_requests_run_leaves_trees_whole(root):
    with open_cache(root) as cache:
        ns = space(cache)
        done = threading.Event()
        failures = []

        def requests(name):
            try:
                number = 0
                while not done.is_set():
                    number += 1
                    prompt = [*TOKENS[:400], *range(1000 * name, 1000 * name + 200)]
                    prompt[300] = number % 5
                    match = find(cache, ns, prompt)
                    tip, base = (match.tip, match.base) if match else (ROOT_NODE, 0)
                    chain = cache.chain(ns, tip, f"request {name}")
                    cuts = [cut for cut in (200, 400, 600) if cut > base]
                    for segment in segments(ns, prompt, cuts, start=base):
                        chain.append(segment)
                    chain.close()
            except GoneError:
                pass
            except Exception as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=requests, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        freed = sum(cache.administration.clear().freed_bytes for _ in range(60))
        done.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert freed > 0
        broken = cache._index.all(
            "SELECT n FROM node WHERE children !="
            " (SELECT count(*) FROM node child WHERE child.parent = node.n)"
            " OR parent NOT IN (SELECT n FROM node UNION SELECT 0)"
        )
        assert not broken
        cache.administration.clear()
        assert cache.stats().account.blobs == 0
        check_account(cache, root)
