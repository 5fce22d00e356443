"""Free space that stays free: on a volume of 64 MiB that others fill as well."""

import os

import pytest
from structlog.testing import capture_logs

from kvport.manifest.limits import GIB, MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache import room
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.room import VolumeSpace, automatic_cap
from tests.cache.builder import (
    check_account,
    find,
    open_cache,
    position,
    read_all,
    segments,
    space,
    store,
    walk,
)
from tests.cache.volume import fill, free_bytes, mounted, simulate

VOLUME = 64 * MIB
FLOOR = 24 * MIB
SIZE = MIB
SLACK = VOLUME // 16
"""Headroom of a cap as large as the volume."""


@pytest.fixture(params=["mounted", "simulated"])
def volume(request, tmp_path, monkeypatch):
    path = tmp_path / "volume"
    path.mkdir()
    if request.param == "mounted":
        with mounted(path, VOLUME) as real:
            if not real:
                pytest.skip("mounting is not allowed")
            yield path
    else:
        simulate(path, monkeypatch, VOLUME)
        yield path


@pytest.fixture
def root(volume):
    return volume / "cache"


def prompt(number: int, length: int = 300) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def put(cache, number: int, size: int = SIZE) -> str | None:
    chain = cache.chain(space(cache), ROOT_NODE, "test")
    for segment in segments(space(cache), prompt(number), [100], size=size):
        chain.append(segment)
    chain.close()
    cache.flush()
    return chain.broken


def kept(cache, numbers) -> list[int]:
    return [n for n in numbers if position(cache, space(cache), prompt(n)) == 100]


def test_b16_the_cache_never_takes_the_floor(volume, root):
    """Cap `auto` on a small disk: it keeps free what must be free, of all kinds."""
    with open_cache(root, None, free_floor=FLOOR) as cache:
        for number in range(60):
            assert put(cache, number) is None
            assert free_bytes(volume) >= FLOOR
        account = cache.stats().account
        assert account.floor == FLOOR
        assert account.cap <= VOLUME // 2
        assert account.reserved <= account.effective <= account.cap
        assert kept(cache, [59]) == [59]
        check_account(cache, root)


def test_b26_others_that_fill_the_disk_cost_the_oldest_and_no_more(volume, root):
    removed = []
    with open_cache(root, VOLUME, removed, free_floor=FLOOR) as cache:
        for number in range(20):
            assert put(cache, number) is None
        assert not removed
        # Ten MiB below the floor: ten of ours have to go, and some headroom.
        fill(volume, FLOOR - 10 * MIB)
        cache.administration.tick()
        assert FLOOR <= free_bytes(volume) <= FLOOR + SLACK + SIZE
        went = len(removed)
        assert 10 <= went <= 15
        assert {gone.reason for gone in removed} == {RemovalReason.EVICTED}
        assert kept(cache, range(20)) == list(range(went, 20))
        # Nothing more for nothing; and a write pays for itself.
        cache.administration.tick()
        assert len(removed) == went
        assert put(cache, 99) is None
        assert free_bytes(volume) >= FLOOR
        assert len(removed) <= went + 2
        check_account(cache, root)


def test_b26_state_in_use_stays_below_the_floor(volume, root):
    with open_cache(root, VOLUME, free_floor=FLOOR) as cache:
        ns = space(cache)
        tip = store(cache, ns, prompt(1), [100, 200], size=4 * SIZE)
        for number in range(2, 12):
            assert put(cache, number) is None
        with cache.lease(ns, tip, "test"):
            fill(volume, MIB)
            cache.administration.tick()
            assert read_all(cache, ns, cache.path(ns, tip))
            assert kept(cache, range(2, 12)) == []
            assert put(cache, 99) == "capacity"
            assert cache.stats().account.used_percent == 100
            assert "--free-floor" in cache.full.reason
        (volume / "neighbour").unlink()
        cache.administration.tick()
        assert put(cache, 99) is None
        assert cache.full is None
        check_account(cache, root)


def test_b23_the_gauge_stays_within_0_and_100(volume, root):
    with open_cache(root, None, free_floor=FLOOR) as cache:
        for number in range(10):
            put(cache, number)
        for leave in (50 * MIB, 30 * MIB, FLOOR, MIB, 0):
            neighbour = fill(volume, leave)
            assert 0 <= cache.stats().account.used_percent <= 100
            cache.administration.tick()
            account = cache.stats().account
            assert 0 <= account.used_percent <= 100
            ours = account.blobs + account.index + account.overhead
            half = (free_bytes(volume) + ours) // 2
            assert account.cap <= max(4 * MIB, half + MIB // 2)
        neighbour.unlink()
        cache.administration.tick()
        assert cache.stats().account.used_percent < 50


def test_an_automatic_cap_follows_the_volume(volume, root):
    with open_cache(root, None, free_floor=0) as cache:
        before = cache.stats().account.cap
        assert VOLUME // 2 - SLACK <= before <= VOLUME // 2
        neighbour = fill(volume, 20 * MIB)
        cache.administration.tick()
        assert cache.stats().account.cap <= 11 * MIB
        for number in range(15):
            put(cache, number)
        assert walk(root) <= 11 * MIB
        neighbour.unlink()
        cache.administration.tick()
        assert cache.stats().account.cap == pytest.approx(before, abs=SLACK)
        check_account(cache, root)


def test_b26_a_start_without_room_serves_and_stores_nothing(volume, root):
    with (
        capture_logs() as logs,
        open_cache(root, VOLUME, free_floor=4 * VOLUME) as cache,
    ):
        ns = space(cache)
        assert put(cache, 1) == "capacity"
        assert put(cache, 2) == "capacity"
        cache.administration.tick()
        account = cache.stats().account
        assert account.effective == 0
        assert (account.floor, account.cap) == (4 * VOLUME, VOLUME)
        assert cache.stats().total.skipped == {"capacity": 2}
        assert find(cache, ns, prompt(1)) is None
        assert cache.full is not None
        assert "--free-floor" in cache.full.reason
    assert [log["event"] for log in logs].count("cache_without_room") == 1


def test_what_is_staged_is_ours(volume, root):
    """An upload's bytes are held and on the disk: they do not count twice."""
    removed = []
    with open_cache(root, VOLUME, removed, free_floor=FLOOR) as cache:
        for number in range(12):
            put(cache, number)
        with cache.reserve(16 * MIB) as held:
            upload = cache.staging("one") / "blob"
            upload.write_bytes(os.urandom(16 * MIB))
            cache.administration.tick()
            assert not removed
            assert put(cache, 99) is None
            assert not removed
            assert held.remaining >= 16 * MIB
        cache.discard_staging("one")
        check_account(cache, root)


def test_room_that_does_not_come_back_is_not_paid_for_again(root, monkeypatch):
    """Snapshots keep what is removed: the cache does not go for nothing."""
    removed = []
    with open_cache(root, VOLUME, removed, free_floor=FLOOR) as cache:
        for number in range(20):
            put(cache, number)
        fixed = VolumeSpace(VOLUME, FLOOR - 3 * MIB)
        monkeypatch.setattr(VolumeSpace, "of", lambda _: fixed)
        for _ in range(5):
            cache.administration.tick()
        went = len(removed)
        assert 3 <= went <= 8
        assert put(cache, 99) == "capacity"
        # After a while it tries again.
        monkeypatch.setattr(room.time, "monotonic", lambda: 1e12)
        cache.administration.tick()
        assert went < len(removed) <= 2 * went + 1


def test_b25_limits_come_from_the_volume_that_holds_the_cache():
    big = VolumeSpace(total=1000 * GIB, free=300 * GIB)
    assert big.floor(None) == 50 * GIB
    assert VolumeSpace(total=100 * GIB, free=1).floor(None) == 10 * GIB
    assert big.floor(0) == 0
    assert automatic_cap(big, 20 * GIB) == 160 * GIB
    # A volume that says nothing, or is full, gives enough to begin with.
    assert Account(automatic_cap(None, 0)).numbers.cap == 4 * MIB
