"""Expiry: state that has expired is a miss before any read, and goes."""

import contextlib

import pytest

from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.records import Pin, RemovalReason
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.errors import DiskFullError, GoneError
from tests.cache.builder import (
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    remove_ended,
    segments,
    select,
    space,
    store,
)

TOKENS = list(range(600))
CUTS = [200, 400, 600]


def test_b86_state_that_ran_out_an_hour_ago_is_a_miss_before_any_read(root, time):
    """Life is not by capacity only, and the files are reclaimed."""
    removed = []
    with open_cache(root, removed=removed, clocks=time.clocks) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, CUTS, ttl=60)
        time.passes(59)
        time.passes(1 + 3600)
        # Whoever opened a file would find it missing, and count damage.
        for path in root.glob("ns/*/*"):
            path.unlink()
        assert find(cache, ns, TOKENS) is None
        with pytest.raises(GoneError, match="expired"):
            cache.lease(ns, tip, "reader")
        assert cache.stats().total.damaged == 0
        assert not removed
        assert remove_ended(cache) == 3
        assert {gone.reason for gone in removed} == {RemovalReason.EXPIRED}
        assert cache.stats().namespaces[0].nodes == 0
        check_account(cache, root)


def test_what_has_expired_stays_so_when_the_clock_is_set_back_a_little(root, time):
    """Also across a restart, where the clock is still within what is tolerated."""
    with open_cache(root, clocks=time.clocks) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, CUTS, ttl=50)
        # The last time that is stored but at the end: 50 s are within SAVED_EVERY.
        time.passes(52)
        assert position(cache, ns, TOKENS) == 0
        time.wall -= 10
        assert position(cache, ns, TOKENS) == 0
    with open_cache(root, clocks=time.clocks, settle=False) as cache:
        assert not cache.stats().clock_behind
        assert position(cache, ns, TOKENS) == 0
        check_account(cache, root)


def test_a_pin_does_not_revive_what_has_expired(cache, ns, root, time):
    tip = store(cache, ns, TOKENS, CUTS, ttl=60)
    time.passes(60)
    with pytest.raises(GoneError, match="expired"):
        cache.administration.pin(ns.id, tip, "a", 60)
    assert position(cache, ns, TOKENS) == 0
    assert cache.administration.pins() == []
    check_account(cache, root)


def test_a_longer_setting_revives_what_was_not_removed(cache, ns, root, time):
    store(cache, ns, TOKENS, CUTS)
    time.passes(60)
    # Applied, and nothing removed yet.
    cache.administration.apply_ttl(ns.id, 30)
    assert position(cache, ns, TOKENS) == 0
    cache.administration.apply_ttl(ns.id, None)
    assert position(cache, ns, TOKENS) == 600
    check_account(cache, root)


def test_a_hit_renews_and_need_not_be_stored_for_it(cache, ns, root, time):
    store(cache, ns, TOKENS, CUTS, ttl=60)
    for _ in range(4):
        time.passes(50)
        # A shorter path lives on by the longer one.
        assert position(cache, ns, TOKENS) == 600
    time.passes(50)
    assert position(cache, ns, TOKENS, limit=400) == 400
    time.passes(11)
    # The last hit was of 400 tokens.
    assert position(cache, ns, TOKENS) == 400
    remove_ended(cache)
    assert position(cache, ns, TOKENS) == 400
    time.passes(60)
    assert position(cache, ns, TOKENS) == 0
    assert remove_ended(cache) == 2
    check_account(cache, root)


def test_a_hit_that_is_only_noted_keeps_state_from_maintenance(cache, ns, time):
    store(cache, ns, TOKENS, CUTS, ttl=60)
    time.passes(59)
    assert position(cache, ns, TOKENS) == 600
    time.passes(1)
    assert remove_ended(cache) == 0
    assert position(cache, ns, TOKENS) == 600


def test_renewal_outlives_a_restart(root, time):
    with open_cache(root, clocks=time.clocks) as cache:
        store(cache, space(cache), TOKENS, CUTS, ttl=60)
        time.passes(50)
        assert position(cache, space(cache), TOKENS) == 600
    time.passes(59)
    with open_cache(root, clocks=time.clocks) as cache:
        assert position(cache, space(cache), TOKENS, limit=400) == 400
        time.passes(61)
        assert position(cache, space(cache), TOKENS) == 0


def test_a_path_lives_as_long_as_its_longest_branch(cache, ns, root, time):
    store(cache, ns, TOKENS, CUTS, ttl=60)
    base = find(cache, ns, TOKENS, limit=400).tip
    branch = [*TOKENS[:400], *range(1000, 1200)]
    end = store(cache, ns, branch, [600], tip=base, start=400, ttl=600)
    time.passes(100)
    assert position(cache, ns, branch, limit=400) == 400
    time.passes(200)
    assert position(cache, ns, TOKENS) == 400
    assert remove_ended(cache) == 1
    # The branch goes, and the path takes its life over.
    cache.administration.clear(nodes=[end], older_than=250)
    assert position(cache, ns, TOKENS) == 400
    check_account(cache, root)


def test_a_pin_keeps_what_expires_readable_and_no_longer(cache, ns, root, time):
    tip = store(cache, ns, TOKENS, CUTS, ttl=60)
    cache.administration.pin(ns.id, tip, "a", 1000)
    time.passes(999)
    assert remove_ended(cache) == 0
    assert position(cache, ns, TOKENS, limit=200) == 200
    time.passes(59)
    assert position(cache, ns, TOKENS) == 200
    time.passes(61)
    assert position(cache, ns, TOKENS) == 0
    assert remove_ended(cache) == 3
    check_account(cache, root)


def test_a_leased_leaf_is_a_miss_and_stays(cache, ns, root, time):
    tip = store(cache, ns, TOKENS, CUTS, ttl=60)
    with cache.lease(ns, tip, "reader", 600):
        time.passes(60)
        assert position(cache, ns, TOKENS) == 0
        assert remove_ended(cache) == 0
    assert remove_ended(cache) == 3
    check_account(cache, root)


def test_the_longer_life_wins_when_state_is_stored_again(cache, ns, time):
    for ttl in (60, 600, 60):
        store(cache, ns, TOKENS, CUTS, ttl=ttl)
    time.passes(599)
    assert position(cache, ns, TOKENS) == 600
    store(cache, ns, TOKENS, CUTS)
    time.passes(1 << 32)
    assert position(cache, ns, TOKENS) == 600


def test_the_namespaces_setting_counts_from_the_last_use(root, time):
    with open_cache(root, clocks=time.clocks) as cache:
        ns, other = space(cache), space(cache, scope="other")
        apply = cache.administration.apply_ttl
        apply("of no namespace yet", 5)
        store(cache, ns, TOKENS, CUTS)
        own = [9, *TOKENS[1:]]
        store(cache, ns, own, CUTS, ttl=10_000)
        store(cache, other, TOKENS, CUTS)
        time.passes(100)
        apply(ns.id, 101)
        time.passes(1)
        assert position(cache, ns, TOKENS) == 0
        assert position(cache, ns, own) == position(cache, other, TOKENS) == 600
        apply(ns.id, 1000)
        assert position(cache, ns, TOKENS) == 600
        time.passes(999)
    with open_cache(root, clocks=time.clocks) as cache:
        cache.administration.apply_ttl(ns.id, 1000)
        assert position(cache, ns, TOKENS) == 600
        time.passes(1000)
        assert position(cache, ns, TOKENS) == 0
        cache.administration.apply_ttl(ns.id, None)
        assert position(cache, ns, TOKENS) == 600
        time.passes(1 << 32)
        assert position(cache, ns, TOKENS) == 600
        check_account(cache, root)


def test_a_setting_is_applied_in_batches(cache, ns, root, time):
    cuts = range(2, 601, 2)
    store(cache, ns, TOKENS, cuts)
    assert len(cuts) > 10 * cache._index.rows_per_removal
    cache.administration.apply_ttl(ns.id, 60)
    assert cache._index.all("SELECT DISTINCT expires FROM node") == [(time.wall + 60,)]
    time.passes(60)
    assert position(cache, ns, TOKENS) == 0
    assert remove_ended(cache) == 300
    assert not blob_files(root)
    check_account(cache, root)


def test_a_clock_that_was_set_back_is_reported_and_makes_expiring_state_unreadable(
    root, time
):
    forever = [9, *TOKENS[1:]]
    with open_cache(root, clocks=time.clocks) as cache:
        ns = space(cache)
        store(cache, ns, forever, CUTS)
        time.passes(100)
        tip = store(cache, ns, TOKENS, CUTS, ttl=10_000)
        assert not cache.stats().clock_behind
    time.wall -= 299
    with open_cache(root, clocks=time.clocks) as cache:
        assert not cache.stats().clock_behind
        assert position(cache, ns, TOKENS) == 600
    time.wall -= 3600
    with open_cache(root, clocks=time.clocks) as cache:
        assert cache.stats().clock_behind
        assert position(cache, ns, TOKENS) == 0
        assert position(cache, ns, forever) == 600
        with pytest.raises(GoneError):
            cache.lease(ns, tip, "reader")
        # Nothing is removed by a clock that cannot be trusted.
        assert remove_ended(cache) == 0
        time.passes(3600)
        assert not cache.stats().clock_behind
        assert position(cache, ns, TOKENS) == 600
        check_account(cache, root)


def test_pins_do_not_end_while_the_clock_is_behind(cache, ns, time):
    tip = store(cache, ns, TOKENS, CUTS)
    until = cache.administration.pin(ns.id, tip, "a", 60)
    time.wall -= 10_000
    assert cache.stats().clock_behind
    [pin] = cache.administration.pins()
    assert (pin.until, pin.seconds_left) == (until, 60)
    time.passes(10_000)
    assert len(cache.administration.pins()) == 1
    time.passes(60)
    assert cache.administration.pins() == []


def test_the_latest_time_is_stored_with_commits_and_seldom(cache, ns, root, time):
    def stored():
        ((seen,),) = cache._index.all("SELECT clock FROM root")
        return seen

    tip = store(cache, ns, TOKENS, CUTS)
    first = stored()
    assert first == time.wall
    time.passes(59)
    tip = store(cache, ns, [*TOKENS, 1], [601], tip=tip, start=600)
    assert stored() == first
    time.passes(1)
    assert stored() == first  # nothing is committed for it
    store(cache, ns, [*TOKENS, 1, 2], [602], tip=tip, start=601)
    assert stored() == first + 60
    check_account(cache, root)


def test_a_lookup_in_a_long_expired_path_takes_no_square_of_its_length(cache, ns, time):
    tokens = list(range(4096))
    store(cache, ns, tokens, range(8, 4097, 8), ttl=60, size=600)
    encoded = encode_tokens(tokens)

    def steps():
        count = 0

        def step():
            nonlocal count
            count += 1

        cache._index._connection.set_progress_handler(step, 100)
        found = cache.match(ns, encoded, select())
        cache._index._connection.set_progress_handler(None, 0)
        return count, found

    live, found = steps()
    assert found.position == 4096
    time.passes(60)
    expired, found = steps()
    assert found is None
    assert expired < 5 * live


# Stored later than it was computed.


@contextlib.contextmanager
def held_up(cache):
    """A volume on which nothing is written for a while."""
    with cache._evictor.changes:
        yield


def bring(cache, ns, pin=None):
    """Hand a whole path to the cache, with 60 s to live."""
    chain = cache.chain(ns, ROOT_NODE, "test", ttl=60, pin=pin)
    for segment in segments(ns, TOKENS, CUTS):
        chain.append(segment)
    chain.close()
    return chain


def test_what_expired_in_the_queue_is_not_stored(cache, ns, root, time):
    with held_up(cache):
        chain = bring(cache, ns)
        time.passes(60)
    cache.flush()
    # The writer may have had the first of it in hand: that is stored, and expired.
    assert position(cache, ns, TOKENS) == 0
    assert set(cache.stats().total.skipped) == {SkipReason.EXPIRED}
    assert chain.broken == "expired"
    remove_ended(cache)
    assert cache.stats().total.written_bytes < 3000
    check_account(cache, root)


@pytest.mark.parametrize(("later", "found"), [(19, 600), (20, 0)])
def test_time_in_the_queue_counts_as_life(cache, ns, time, later, found):
    with held_up(cache):
        bring(cache, ns)
        time.passes(40)
    cache.flush()
    assert not cache.stats().total.skipped
    time.passes(later)
    assert position(cache, ns, TOKENS) == found


def test_a_batch_that_is_tried_again_lives_no_longer(cache, ns, time, monkeypatch):
    write, tried = cache._files.write, []

    def full_at_first(*arguments):
        if not tried:
            tried.append(None)
            time.passes(40)
            raise DiskFullError("the volume is full")
        return write(*arguments)

    store(cache, space(cache, model=1), TOKENS, CUTS)
    with monkeypatch.context() as patch:
        patch.setattr(cache._files, "write", full_at_first)
        bring(cache, ns)
        cache.flush()
    assert tried
    time.passes(20)
    assert position(cache, ns, TOKENS) == 0


def test_what_a_request_pins_is_stored_and_pinned_however_late(cache, ns, time):
    """A pin goes before the request's own ttl."""
    told = []
    with held_up(cache):
        bring(cache, ns, pin=Pin("night", 3600, told.append))
        time.passes(60)
    cache.flush()
    assert [one.tokens for one in told] == [600]
    time.passes(3599)
    assert position(cache, ns, TOKENS) == 600


def test_late_segments_live_from_the_last_use_of_their_chain(cache, ns, time):
    first, *rest = segments(ns, TOKENS, CUTS)
    chain = cache.chain(ns, ROOT_NODE, "test", ttl=60)
    chain.append(first)
    time.passes(30)
    chain.use()
    cache.flush()
    time.passes(40)
    assert position(cache, ns, TOKENS) == 200
    chain.use()
    time.passes(40)
    for segment in rest:
        chain.append(segment, late=True)
    chain.close()
    cache.flush()
    time.passes(19)
    assert position(cache, ns, TOKENS, limit=200) == 200
    time.passes(1)
    # That hit renewed what is restored alone.
    assert position(cache, ns, TOKENS) == 200


def test_a_late_use_does_not_take_back_a_later_one(cache, ns, root, time):
    """The same segments come again, computed before the last hit."""
    store(cache, ns, TOKENS, CUTS, ttl=60)
    chain = cache.chain(ns, ROOT_NODE, "test", ttl=60)
    time.passes(50)
    assert position(cache, ns, TOKENS) == 600
    for segment in segments(ns, TOKENS, CUTS):
        chain.append(segment, late=True)
    chain.close()
    cache.flush()
    time.passes(59)
    assert position(cache, ns, TOKENS) == 600
    check_account(cache, root)


def test_a_lease_does_not_make_expired_state_readable(cache, ns, time):
    tip = store(cache, ns, TOKENS, CUTS, ttl=60)
    chain = cache.chain(ns, tip, "test", ttl=60)
    time.passes(60)
    assert position(cache, ns, TOKENS) == 0
    remove_ended(cache)
    assert cache.stats().namespaces[0].nodes == 3
    chain.close()
    cache.flush()
    assert position(cache, ns, TOKENS) == 0
    assert remove_ended(cache) == 3
