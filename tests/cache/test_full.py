"""A volume without room: our own state makes it, and a start never fails for it."""

import os

import pytest

from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.records import RemovalReason
from tests.cache.builder import (
    check_account,
    encode_tokens,
    find,
    open_cache,
    position,
    read_all,
    segments,
    select,
    space,
    store,
    walk,
)
from tests.cache.volume import fill, mounted, simulate

CAP = 8 * MIB
ENDS = [100, 200]
BALLAST = 256 * 1024


@pytest.fixture(params=["mounted", "simulated"])
def volume(request, tmp_path, monkeypatch):
    path = tmp_path / "volume"
    path.mkdir()
    if request.param == "mounted":
        with mounted(path) as real:
            if not real:
                simulate(path, monkeypatch)
            yield path
    else:
        simulate(path, monkeypatch)
        yield path


def prompt(number: int) -> list[int]:
    return [number, *range(300)]


def stored(cache, number: int, size: int = 150_000) -> bool:
    chain = cache.chain(space(cache), ROOT_NODE, "test")
    for segment in segments(space(cache), prompt(number), ENDS, size=size):
        chain.append(segment)
    chain.close()
    cache.flush()
    return chain.broken is None


def test_a_volume_full_of_our_own_goes_on_through_restarts(volume):
    root = volume / "cache"
    for start in range(6):
        removed = []
        with open_cache(root, CAP, removed) as cache:
            ns = space(cache)
            check_account(cache, root)
            for number in range(8):
                assert stored(cache, start * 8 + number)
                assert position(cache, ns, prompt(start * 8 + number)) == 200
            read_all(cache, ns, find(cache, ns, prompt(start * 8 + 7)).nodes)
            assert not cache.stats().total.skipped
            assert {gone.reason for gone in removed} <= {RemovalReason.EVICTED}
            assert start == 0 or removed
            check_account(cache, root)


def test_b26_a_neighbour_that_takes_the_rest_does_not_keep_it_from_opening(volume):
    root = volume / "cache"
    with open_cache(root, CAP) as cache:
        for number in range(6):
            assert stored(cache, number)
    fill(volume)
    removed = []
    with open_cache(root, CAP, removed) as cache:
        assert 0 < len(removed) < 8
        assert (root / "ballast").stat().st_size == BALLAST
        left = os.statvfs(root)
        assert left.f_bavail * left.f_frsize >= BALLAST // 2
        assert stored(cache, 100)
        assert position(cache, space(cache), prompt(5)) == 200
        check_account(cache, root)


@pytest.mark.parametrize("ballast", [True, False])
def test_a_start_that_must_evict_does_so_without_a_free_byte(volume, ballast):
    root = volume / "cache"
    with open_cache(root, CAP) as cache:
        for number in range(7):
            assert stored(cache, number)
        ns = space(cache)
        node = find(cache, ns, prompt(0)).nodes[-1]
        # As a crash after the first commit of a removal leaves it.
        with cache._index.transaction():
            cache._index.remove([cache._index.find(1, node.id)])
    if not ballast:
        (root / "ballast").unlink()
    fill(volume)
    removed = []
    with open_cache(root, 3 * MIB + MIB, removed) as cache:
        assert position(cache, ns, prompt(6)) == 200
        assert stored(cache, 100)
        assert {gone.reason for gone in removed} <= {RemovalReason.EVICTED}
        check_account(cache, root)
    with open_cache(root, CAP, removed) as cache:
        assert position(cache, ns, prompt(100)) == 200
        assert cache.stats().index_resets == 0
        check_account(cache, root)


def test_evicting_without_ballast_and_room_unlinks_before_it_commits(volume):
    root, removed = volume / "cache", []
    with open_cache(root, CAP, removed) as cache:
        for number in range(4):
            assert stored(cache, number)
        cache._index.checkpoint()
        (root / "ballast").unlink()
        fill(volume)
        assert cache._evictor.free(1)
        assert [gone.end for gone in removed][:1] == [200]
        assert {gone.reason for gone in removed} == {RemovalReason.EVICTED}
        assert position(cache, space(cache), prompt(3)) == 200
        # The next batch finds that the ballast is missing, and makes room for it too.
        assert stored(cache, 9)
        cache._evictor.ensure_reserve()
        assert (root / "ballast").stat().st_size == BALLAST
        check_account(cache, root)


def test_state_in_use_is_not_evicted_for_a_full_volume(volume):
    root = volume / "cache"
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(1), ENDS, size=900_000)
        with cache.lease(ns, tip, "test"):
            fill(volume)
            assert not stored(cache, 2)
            assert cache.stats().total.skipped == {"disk_full": 2}
            assert read_all(cache, ns, cache.path(ns, tip))
        assert stored(cache, 2)
        check_account(cache, root)


def test_closing_on_a_full_volume_gives_the_root_up(volume):
    root = volume / "cache"
    cache = open_cache(root, CAP)
    assert stored(cache, 1)
    cache._index.checkpoint()
    cache._index.touch(1)
    (root / "ballast").unlink()
    fill(volume)
    cache.close()
    cache.close()
    with open_cache(root, CAP) as cache:
        check_account(cache, root)


def test_a_lookup_does_not_fail_for_a_recency_that_cannot_be_stored(volume):
    root = volume / "cache"
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        assert stored(cache, 1)
        cache._index.checkpoint()
        (root / "ballast").unlink()
        neighbour = fill(volume)
        for _ in range(3):
            cache.match(ns, encode_tokens(prompt(1)), select())
            cache._index.touch(1)
            cache._index.touch(2)
        neighbour.unlink()


def as_directory(ballast):
    ballast.unlink()
    (ballast / "deep").mkdir(parents=True)


def as_holes(ballast):
    ballast.unlink()
    ballast.touch()
    os.truncate(ballast, BALLAST)


def as_fifo(ballast):
    ballast.unlink()
    os.mkfifo(ballast)


@pytest.mark.parametrize("harm", [os.unlink, as_directory, as_holes, as_fifo])
def test_the_ballast_is_made_at_start_and_again_after_a_batch(root, harm):
    ballast = root / "ballast"
    with open_cache(root, CAP) as cache:
        assert ballast.stat().st_blocks * 512 >= BALLAST
        assert cache.stats().account.overhead > BALLAST
        check_account(cache, root)
        harm(ballast)
        assert stored(cache, 1)
        assert ballast.stat().st_blocks * 512 >= BALLAST
        check_account(cache, root)
    harm(ballast)
    with open_cache(root, 64 * MIB) as cache:
        assert ballast.stat().st_size == MIB
        check_account(cache, root)
    with open_cache(root, 4 * MIB) as cache:
        assert ballast.stat().st_size == 128 * 1024
        assert walk(root) <= 4 * MIB


def test_a_cap_that_leaves_no_room_is_said_until_something_is_stored(root):
    with open_cache(root, 4 * MIB) as cache:
        assert cache.full is None
        assert not stored(cache, 1, size=4 * MIB)
        assert "the cap" in cache.full.reason
        since = cache.full.since
        assert not stored(cache, 2, size=4 * MIB)
        assert cache.full.since == since
        assert stored(cache, 3, size=1000)
        assert cache.full is None


def test_full_ends_once_room_was_made(root):
    with open_cache(root, 4 * MIB) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(0), ENDS, size=MIB)
        with cache.lease(ns, tip, "test"):
            assert not stored(cache, 1, size=MIB)
            assert "no room for" in cache.full.reason
            cache._tick()
            assert "no room for" in cache.full.reason
        cache._tick()  # what was in use can go now
        assert cache.full is None
        with cache.lease(ns, tip, "test"):
            assert not stored(cache, 1, size=MIB)
            assert cache.full is not None
        cache.administration.clear()
        assert cache.full is None
        check_account(cache, root)


def test_full_ends_once_the_volume_has_room(volume):
    root = volume / "cache"
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(0), ENDS, size=500_000)
        with cache.lease(ns, tip, "test"):
            fill(volume)
            assert not stored(cache, 1, size=500_000)
            assert "the volume is full" in cache.full.reason
            cache.administration.tick()
            assert cache.full is not None
            (volume / "neighbour").unlink()
            cache.administration.tick()
            if volume.is_mount():  # a simulated one says what the real one has
                assert cache.full is None
        check_account(cache, root)
