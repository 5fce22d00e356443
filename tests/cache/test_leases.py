"""Leases: whose they are, until when they hold, and what one that ran out says."""

import sys
import time as system_time

import pytest

from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.clock import SYSTEM, boot_seconds
from kvport.snapshot.cache.leases import LEASE_SECONDS
from kvport.snapshot.errors import GoneError
from tests.cache.builder import (
    check_account,
    evict_all,
    position,
    segments,
    space,
    store,
)

TOKENS = list(range(600))
CUTS = [200, 400, 600]


def test_a_lease_holds_until_its_time_and_says_when_it_does_not(cache, ns, root, time):
    tip = store(cache, ns, TOKENS, CUTS)
    lease = cache.lease(ns, tip, "reader", 60)
    time.passes(59)
    lease.check()
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 600
    assert cache.stats().leases == 1
    time.passes(1)
    assert not lease.valid
    assert cache.stats().leases == 0
    for use in (lease.check, lambda: lease.renew(60), lambda: lease.move(ROOT_NODE)):
        with pytest.raises(GoneError):
            use()
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 0
    lease.release()
    check_account(cache, root)


def test_a_lease_is_renewed_by_its_owner_only(cache, ns, time):
    tip = store(cache, ns, TOKENS, CUTS)
    mine, theirs = cache.lease(ns, tip, "me", 60), cache.lease(ns, tip, "you", 60)
    for _ in range(3):
        time.passes(50)
        mine.renew(60)
    assert mine.valid
    assert not theirs.valid
    position(cache, ns, TOKENS)
    time.passes(60)
    assert not mine.valid
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 0


def test_b72_one_owner_does_not_release_what_another_holds(cache, ns, root, time):
    """A and B hold the same chunk; A finishes, and B still reads."""
    tip = store(cache, ns, TOKENS, CUTS)
    a, b = cache.lease(ns, tip, "a", 60), cache.lease(ns, tip, "b", 90)
    a.release()
    a.release()
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 600
    cleared = cache.administration.clear()
    assert (cleared.removed_segments, cleared.freed_bytes) == (0, 0)
    assert cleared.kept == {"leased": 3}
    b.check()
    time.passes(90)
    assert cache.administration.clear().removed_segments == 3
    with pytest.raises(GoneError):
        b.check()
    check_account(cache, root)


def test_leases_are_listed_with_who_holds_what_and_for_how_long(cache, ns, time):
    tip = store(cache, ns, TOKENS, CUTS)
    half = cache.path(ns, tip)[1]
    with (
        cache.lease(ns, tip, "export 7", 120),
        cache.lease(ns, half.id, "request 3", 60),
        cache.lease(ns, ROOT_NODE, "holds nothing"),
    ):
        time.passes(10)
        first, second = cache.administration.leases()
    assert (first.owner, first.namespace, first.node) == ("request 3", ns.id, half.id)
    assert (first.tokens, first.seconds_left, first.node) == (400, 50, half.id)
    assert (second.owner, second.tokens, second.seconds_left) == ("export 7", 600, 110)
    assert cache.administration.leases() == []


def test_a_running_chain_is_held_anew_with_each_segment(cache, ns, time):
    chain = cache.chain(ns, ROOT_NODE, "request")
    for segment in segments(ns, TOKENS, CUTS):
        chain.append(segment)
        cache.flush()
        time.passes(LEASE_SECONDS - 1)
        evict_all(cache)
        assert position(cache, ns, TOKENS) == segment.end
    chain.close()
    cache.flush()
    assert chain.broken is None
    assert cache.stats().leases == 0


def test_a_chain_that_slept_goes_on_where_its_path_still_is(cache, ns, time):
    first, second, third = segments(ns, TOKENS, CUTS)
    chain = cache.chain(ns, ROOT_NODE, "request")
    chain.append(first)
    cache.flush()
    time.passes(2 * LEASE_SECONDS)
    chain.append(second)
    cache.flush()
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 400
    time.passes(2 * LEASE_SECONDS)
    evict_all(cache)
    chain.append(third)
    chain.close()
    cache.flush()
    assert chain.broken == "gone"
    assert position(cache, ns, TOKENS) == 0


def test_damage_goes_in_spite_of_a_lease(cache, ns, root):
    tip = store(cache, ns, TOKENS, CUTS)
    with cache.lease(ns, tip, "reader") as lease:
        cache.report_damage(ns, cache.path(ns, tip)[1].blobs[0])
        with pytest.raises(GoneError):
            cache.path(ns, tip)
        assert lease.valid  # of what is left
    check_account(cache, root)


def test_b73_a_target_is_held_until_the_source_has_let_go(cache, root):
    """Moved under pressure, some locked at the source: done must not mean lost."""
    source, target = (space(cache, scope=scope) for scope in ("source", "target"))
    prompts = [[n, *TOKENS[1:]] for n in range(1, 21)]
    moved = [store(cache, source, prompt, CUTS, variant=prompt) for prompt in prompts]
    reading = [cache.lease(source, tip, "reader") for tip in moved[:5]]
    held = [
        cache.lease(target, store(cache, target, prompt, CUTS, variant=prompt), "move")
        for prompt in prompts
    ]
    evict_all(cache)  # what pressure at the target would do
    for tip in moved[5:]:
        assert not cache.administration.clear([source.id], nodes=[tip]).kept
    cleared = cache.administration.clear([source.id], nodes=moved)
    assert cleared.kept == {"leased": 15}
    assert [position(cache, source, p) for p in prompts] == [600] * 5 + [0] * 15
    assert all(lease.valid for lease in held)
    assert [position(cache, target, p) for p in prompts] == [600] * 20
    for lease in [*held, *reading]:
        lease.release()
    assert cache.administration.clear([source.id]).removed_segments == 15
    assert [position(cache, target, p) for p in prompts] == [600] * 20
    check_account(cache, root)


def test_the_boot_clock_counts_sleep_and_does_not_go_back():
    clock = (
        system_time.CLOCK_BOOTTIME
        if sys.platform == "linux"
        else system_time.CLOCK_MONOTONIC
    )
    before = system_time.clock_gettime(clock)
    assert before <= boot_seconds() <= SYSTEM.boot() <= before + 60
