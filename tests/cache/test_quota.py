"""Quotas: a limit for the namespace itself, and a share that others cannot take."""

import threading

import pytest

from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.policy import NamespaceSettings, Tier
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import QuotaError
from tests.cache.builder import (
    HYBRID,
    check_account,
    find,
    open_cache,
    position,
    segments,
    space,
    store,
    used,
    with_tokens,
)

SIZE = 250_000
CAP = 12 * MIB


def prompt(number: int, length: int = 300) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def quota(nbytes: int | None, **more) -> NamespaceSettings:
    return NamespaceSettings(quota_bytes=nbytes, **more)


def fill(cache, ns, numbers, size=SIZE):
    for number in numbers:
        store(cache, ns, prompt(number), [100, 200], size=size)


def test_a_namespace_stays_below_its_quota_by_its_own_oldest(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        own, other = space(cache), space(cache, model=1)
        cache.configure(own.id, quota(MIB))
        fill(cache, other, range(10))
        for number in range(8):
            fill(cache, own, [number])
            assert used(cache, own) <= MIB
        assert {gone.reason for gone in removed} == {RemovalReason.QUOTA}
        assert {gone.namespace for gone in removed} == {own.id}
        assert position(cache, own, prompt(7)) == 200
        assert find(cache, own, prompt(0)) is None
        check_account(cache, root)


def test_a_batch_of_many_segments_stays_below_the_quota(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        cache.configure(ns.id, quota(MIB))
        chains = []
        for number in range(6):
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, prompt(number), [100, 200], size=SIZE):
                chain.append(segment)
            chains.append(chain)
        cache.flush()
        assert used(cache, ns) <= MIB
        # All are leased still: what finds no room is skipped, for this reason.
        assert set(cache.stats().total.skipped) == {"quota"}
        for chain in chains:
            chain.close()
        cache.flush()
        check_account(cache, root)


def test_what_is_larger_than_the_quota_evicts_nothing(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        cache.configure(ns.id, quota(MIB))
        fill(cache, ns, range(2))
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, prompt(9), [100], size=2 * MIB):
            chain.append(segment)
        chain.close()
        cache.flush()
        assert (chain.broken, removed) == ("quota", [])


def test_a_lower_quota_holds_at_once_and_for_that_namespace_only(root):
    """B19, B36: what one model gives back is its own."""
    removed = []
    with open_cache(root, CAP, removed) as cache:
        one, other = space(cache), space(cache, model=1)
        fill(cache, one, range(10))
        fill(cache, other, range(10))
        kept = used(cache, other)
        running = cache.chain(other, ROOT_NODE, "test")
        cache.configure(one.id, quota(MIB))
        assert MIB - 2 * SIZE < used(cache, one) <= MIB
        assert position(cache, one, prompt(9)) == 200
        cache.configure(one.id, quota(1))
        assert (used(cache, one), used(cache, other)) == (0, kept)
        assert {gone.namespace for gone in removed} == {one.id}
        assert {gone.reason for gone in removed} == {RemovalReason.QUOTA}
        for segment in segments(other, prompt(99), [100], size=SIZE):
            running.append(segment)
        running.close()
        cache.flush()
        assert running.broken is None
        check_account(cache, root)


def test_what_a_quota_makes_pointless_goes_with_it(root):
    """A point that goes takes along the rows that led to it only; plan and gc agree."""
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache, HYBRID)
        for number in range(3):
            store(cache, ns, prompt(number), [100, 200, 300], states=[300], size=SIZE)
        one = used(cache, ns) // 3
        for limit, left in ((3 * one - 1, (1, 2)), (one + one // 2, (2,))):
            before = len(removed)
            plan = cache.administration.plan(quotas={ns.id: limit})
            assert plan.nbytes == used(cache, ns) - one * len(left)
            assert plan == cache.administration.plan(quotas={ns.id: limit}, gc=True)
            cache.configure(ns.id, quota(limit))
            went = removed[before:]
            assert len(went) == plan.nodes == 3
            reasons = {RemovalReason.QUOTA, RemovalReason.POINTLESS}
            assert {gone.reason for gone in went} == reasons
            assert [n for n in range(3) if position(cache, ns, prompt(n))] == [*left]
            assert not cache.administration.gc().nodes
        check_account(cache, root)


def test_of_a_namespace_beyond_its_quota_rows_without_a_point_go_first(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache, HYBRID)
        store(cache, ns, prompt(1), [100, 200], states=[200], size=SIZE)
        good = used(cache, ns)
        store(cache, ns, prompt(2), [100, 200], states=[], size=SIZE)
        cache.configure(ns.id, quota(used(cache, ns) - 1))
        assert used(cache, ns) == good
        assert position(cache, ns, prompt(1)) == 200
        check_account(cache, root)


def test_a_quota_below_what_is_pinned_says_so_and_is_met_afterwards(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        admin = cache.administration
        tip = store(cache, ns, prompt(1), [100, 200], size=SIZE)
        admin.pin(ns.id, tip, "a", 60)
        held = used(cache, ns)
        plan = admin.plan(quotas={ns.id: SIZE})
        assert (plan.nodes, plan.over_quota) == (0, {ns.id: held - SIZE})
        assert plan.missing == plan.in_use == held - SIZE
        assert admin.plan().over_quota == {}
        assert not cache.configure(ns.id, quota(SIZE)).nodes
        assert [one.over_quota for one in admin.namespaces()] == [held - SIZE]
        admin.unpin(ns.id, tip, "a")
        admin.tick()
        assert used(cache, ns) <= SIZE
        assert [one.over_quota for one in admin.namespaces()] == [0]
        check_account(cache, root)


test_b19_only_the_namespace_asked_for_is_reclaimed = (
    test_a_lower_quota_holds_at_once_and_for_that_namespace_only
)


def test_a_busy_namespace_cannot_evict_a_quiet_one_below_its_share(root):
    with open_cache(root, CAP) as cache:
        quiet, busy = space(cache), space(cache, model=1)
        cache.configure(quiet.id, quota(2 * MIB))
        fill(cache, quiet, range(4))
        held = used(cache, quiet)
        assert held <= 2 * MIB
        fill(cache, busy, range(100, 130))
        assert used(cache, quiet) == held
        assert all(position(cache, quiet, prompt(n)) == 200 for n in range(4))
        assert position(cache, busy, prompt(129)) == 200
        check_account(cache, root)


def test_without_a_quota_nothing_is_protected(root):
    with open_cache(root, CAP) as cache:
        quiet, busy = space(cache), space(cache, model=1)
        fill(cache, quiet, range(10))
        fill(cache, busy, range(100, 130))
        assert used(cache, quiet) == 0


def test_quotas_beyond_the_cap_are_scaled(root):
    with open_cache(root, CAP) as cache:
        one, other = space(cache), space(cache, model=1)
        cache.configure(one.id, quota(3 * CAP))
        cache.configure(other.id, quota(CAP))
        shares = {info.id: info.share for info in cache.administration.namespaces()}
        account = cache.stats().account
        room = account.effective - MIB - account.index - account.overhead
        assert sum(shares.values()) <= room
        assert shares[one.id] == pytest.approx(3 * shares[other.id], abs=4096)
        # Each may fill what the other leaves, and falls back to its share.
        fill(cache, one, range(30))
        assert used(cache, one) > shares[one.id]
        fill(cache, other, range(20))
        # The index has grown, and its log comes and goes: so do shares, a bit.
        assert used(cache, one) >= shares[one.id] - 4 * SIZE
        assert used(cache, other) >= shares[other.id] - 4 * SIZE
        fill(cache, one, range(200, 210))
        assert position(cache, one, prompt(209)) == 200
        check_account(cache, root)


def test_a_namespace_at_its_share_makes_room_for_itself(root):
    """All is protected, and together as much as the cap: its own oldest go."""
    with open_cache(root, CAP) as cache:
        spaces = [space(cache, model=n) for n in range(3)]
        for ns in spaces:
            cache.configure(ns.id, quota(CAP))
        for turn in range(2):
            for ns in spaces:
                fill(cache, ns, range(turn * 50, turn * 50 + 12))
                assert position(cache, ns, prompt(turn * 50 + 11)) == 200
        shares = {info.id: info.share for info in cache.administration.namespaces()}
        for ns in spaces:
            assert used(cache, ns) >= shares[ns.id] - 3 * SIZE
        check_account(cache, root)


def test_an_import_is_held_to_the_quota(root, tmp_path):
    with open_cache(tmp_path / "a", CAP) as cache:
        tip = store(cache, space(cache), prompt(1), [100, 200], size=SIZE)
        path = with_tokens(cache.path(space(cache), tip), encode_tokens(prompt(1)))
        blobs = {
            b.digest: bytes(cache.read(space(cache), b)) for n in path for b in n.blobs
        }
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        cache.configure(ns.id, quota(MIB))
        fill(cache, ns, range(10, 15))
        before = used(cache, ns)

        def admit():
            with cache.reserve(sum(map(len, blobs.values())), files=2) as held:
                staged = {}
                for digest, data in blobs.items():
                    staged[digest] = cache.staging("one") / digest.hex()
                    staged[digest].write_bytes(data)
                try:
                    return cache.admit(ns, path, staged, held)
                finally:
                    cache.discard_staging("one")

        assert admit().admitted_segments == 2
        assert before - 2 * SIZE < used(cache, ns) <= MIB
        assert position(cache, ns, prompt(1)) == 200
        check_account(cache, root)
        cache.configure(ns.id, quota(SIZE))
        with pytest.raises(QuotaError):
            admit()
        check_account(cache, root)


def test_quotas_hold_from_the_start_on(root):
    with open_cache(root, 2 * CAP) as cache:
        quiet, busy = space(cache), space(cache, model=1)
        fill(cache, quiet, range(4))
        fill(cache, busy, range(100, 135))
        held = used(cache, quiet)
    settings = {quiet.id: quota(2 * MIB), busy.id: NamespaceSettings(tier=Tier.OFF)}
    with open_cache(root, CAP, settings=lambda one: settings[one.id]) as cache:
        assert used(cache, quiet) == held
        assert cache.settings(busy.id).tier is Tier.OFF
        assert cache.settings("unheard of") == NamespaceSettings()
        check_account(cache, root)


def test_settings_change_while_chains_store(root):
    with open_cache(root, CAP) as cache:
        spaces = [space(cache, model=n) for n in range(2)]
        threads = [
            threading.Thread(target=fill, args=(cache, ns, range(15))) for ns in spaces
        ]
        for thread in threads:
            thread.start()
        for turn in range(20):
            cache.configure(spaces[turn % 2].id, quota((1 + turn % 3) * MIB))
        for thread in threads:
            thread.join()
        for ns in spaces:
            assert used(cache, ns) <= cache.settings(ns.id).quota_bytes
        check_account(cache, root)
