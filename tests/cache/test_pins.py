"""Pins: several owners, fixed deadlines, across restarts, and never the whole cache."""

import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.records import Pin, RemovalReason
from kvport.snapshot.errors import GoneError, PinLimitError
from tests.cache.builder import (
    HYBRID,
    blob_files,
    check_account,
    evict_all,
    open_cache,
    position,
    read_all,
    remove_ended,
    space,
    store,
    walk,
)
from tests.cache.conversations import ALL, Talk

TOKENS = list(range(600))
CUTS = [200, 400, 600]


def rows(cache):
    ((count,),) = cache._index.all("SELECT count(*) FROM pin")
    return count


def test_b72_pins_have_owners(cache, ns, root, time):
    """A and B pin the same chunk; A is done, a clear comes: B's is neither stranded."""
    tip = store(cache, ns, TOKENS, CUTS)
    admin = cache.administration
    assert admin.pin(ns.id, tip, "a", 60) == time.wall + 60
    admin.pin(ns.id, tip, "b", 600)
    assert admin.unpin(ns.id, tip, "a")
    assert not admin.unpin(ns.id, tip, "a")
    assert not admin.unpin(ns.id, tip, "c")
    evict_all(cache)
    assert admin.clear().kept == {"pinned": 3}
    assert position(cache, ns, TOKENS) == 600
    [pin] = admin.pins()
    assert (pin.owner, pin.namespace, pin.node, pin.tokens) == ("b", ns.id, tip, 600)
    assert (pin.until, pin.seconds_left) == (time.wall + 600, 600)
    forced = admin.clear(force=True)
    assert (forced.removed_segments, forced.kept) == (3, {})
    assert rows(cache) == cache.stats().pins == 0
    check_account(cache, root)


def test_b78_a_pin_that_ran_out_stays_so_when_it_is_read(root, time):
    """Pin for a second, wait for two, read, fill the cache."""
    with open_cache(root, 4 * MIB, clocks=time.clocks) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, CUTS, size=50_000)
        cache.administration.pin(ns.id, tip, "a", 1)
        time.passes(0.5)
        assert position(cache, ns, TOKENS) == 600  # does not prolong it
        time.passes(1.5)
        assert cache.administration.pins() == []
        assert position(cache, ns, TOKENS) == 600
        read_all(cache, ns, cache.path(ns, tip))
        assert cache.stats().pins == 0
        for number in range(60):
            store(cache, ns, [number + 1, *TOKENS[1:]], CUTS, size=50_000)
        assert position(cache, ns, TOKENS) == 0
        check_account(cache, root)


def test_pinning_again_sets_the_own_deadline_anew_and_no_other(cache, ns, time):
    tip = store(cache, ns, TOKENS, CUTS)
    pin = cache.administration.pin
    pin(ns.id, tip, "a", 1000)
    pin(ns.id, tip, "b", 500)
    pin(ns.id, tip, "a", 100)
    left = {pin.owner: pin.seconds_left for pin in cache.administration.pins()}
    assert left == {"a": 100, "b": 500}
    time.passes(200)
    assert [pin.owner for pin in cache.administration.pins()] == ["b"]
    assert rows(cache) == 2
    remove_ended(cache)
    assert rows(cache) == 1


def test_pins_survive_a_restart_and_a_smaller_cap(root, time):
    with open_cache(root, 16 * MIB, clocks=time.clocks) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, CUTS, size=200_000)
        cache.administration.pin(ns.id, tip, "a", 3600)
        for number in range(20):
            store(
                cache, ns, [number + 1, *TOKENS[1:]], CUTS, size=200_000, variant=number
            )
    with open_cache(root, 4 * MIB, clocks=time.clocks) as cache:
        evict_all(cache)
        assert position(cache, ns, TOKENS) == 600
        assert len(blob_files(root)) == 3
        time.passes(3600)
        evict_all(cache)
        assert not blob_files(root)
        check_account(cache, root)


def test_pins_beyond_half_of_a_smaller_cap_end_and_the_cap_holds(root, time):
    removed = []
    with open_cache(root, clocks=time.clocks) as cache:
        ns = space(cache)
        for n in range(28):
            tip = store(cache, ns, [n, *range(255)], [256], size=MIB, variant=n)
            # The first to be pinned ends last; one is held by two.
            cache.administration.pin(ns.id, tip, "a", 10_000 - n)
        cache.administration.pin(ns.id, tip, "b", 5)
        plan = cache.administration.plan(cap=16 * MIB)
        assert cache.stats().pins == 28
    [row] = plan.rows
    assert (row.reason, plan.missing) == (RemovalReason.EVICTED, 0)
    with open_cache(root, 16 * MIB, removed, clocks=time.clocks) as cache:
        assert walk(root) <= cache.stats().account.reserved <= 16 * MIB
        left = [pin.until for pin in cache.administration.pins()]
        assert left == sorted(int(time.wall) + 10_000 - n for n in range(len(left)))
        # Blobs are a block more than 1 MiB each.
        assert len(left) == 7
        # One node is held by two.
        assert plan.ended_pins == 28 + 1 - 7
        assert cache.stats().total.ended_pins == 28 - 7 + 1
        assert len(removed) == row.nodes == cache.stats().total.removed["evicted"]
        for n in range(7):
            assert position(cache, ns, [n, *range(255)]) == 256
        store(cache, ns, [99, *range(255)], [256], size=MIB, variant=99)
        assert not cache.stats().total.skipped
        check_account(cache, root)


def test_a_pin_that_is_too_large_leaves_smaller_ones_that_end_earlier(root, time):
    with open_cache(root, clocks=time.clocks) as cache:
        ns = space(cache)
        for n, size in enumerate([5 * MIB, MIB, MIB]):
            tip = store(cache, ns, [n, *range(255)], [256], size=size, variant=n)
            cache.administration.pin(ns.id, tip, f"p{n}", 100 - n)
    with open_cache(root, 8 * MIB, clocks=time.clocks) as cache:
        assert [pin.owner for pin in cache.administration.pins()] == ["p2", "p1"]
        check_account(cache, root)


def test_pins_cover_half_of_the_cap_at_most(root, time):
    with open_cache(root, 4 * MIB, clocks=time.clocks) as cache:
        ns = space(cache)
        tips = [
            store(cache, ns, [n, *TOKENS[1:]], CUTS, size=250_000, variant=n)
            for n in (1, 2, 3)
        ]
        pin = cache.administration.pin
        pin(ns.id, tips[1], "a", 60)
        pin(ns.id, tips[2], "a", 60)
        pin(ns.id, tips[2], "b", 60)  # covers nothing more
        store(cache, ns, [4, *TOKENS[1:]], CUTS, size=250_000, variant=4)
        five = store(
            cache,
            ns,
            [5, *TOKENS[1:]],
            CUTS,
            size=250_000,
            variant=5,
            pin=Pin("request", 60),
        )
        assert cache.stats().total.failed_pins == 1
        with pytest.raises(PinLimitError):
            pin(ns.id, five, "a", 60)
        assert cache.stats().pins == 2
        time.passes(60)
        pin(ns.id, five, "a", 60)
        check_account(cache, root)


def test_a_request_pins_what_it_stored_last(cache, ns, root):
    tip = store(cache, ns, TOKENS, CUTS, pin=Pin("first", 600))
    evict_all(cache)
    [pin] = cache.administration.pins()
    assert (pin.owner, pin.node, pin.tokens) == ("first", tip, 600)
    # Nothing new: then what it began at.
    chain = cache.chain(ns, tip, "request", pin=Pin("second", 60))
    chain.close()
    chain = cache.chain(ns, ROOT_NODE, "request", pin=Pin("nothing to pin", 60))
    chain.close()
    cache.flush()
    assert {pin.owner for pin in cache.administration.pins()} == {"first", "second"}
    assert cache.stats().total.failed_pins == 0
    check_account(cache, root)


def test_a_pin_goes_no_further_than_what_can_be_restored(cache, root):
    """Rows behind the last point, or without any, are not worth a pin."""
    told = []
    ns = space(cache, HYBRID)
    wish = Pin("first", 600, told.append)
    store(cache, ns, TOKENS, CUTS, states=[400], pin=wish)
    [pin] = cache.administration.pins()
    assert pin.tokens == 400
    assert (told[-1].tokens, told[-1].reason) == (400, "not_restorable")
    wish = Pin("second", 600, told.append)
    store(cache, ns, [7, *TOKENS[1:]], CUTS, states=[], pin=wish)
    assert (told[-1].tokens, told[-1].until) == (0, None)
    assert told[-1].reason == "not_restorable"
    assert [pin.owner for pin in cache.administration.pins()] == ["first"]
    check_account(cache, root)


def test_what_cannot_be_pinned_is_refused(cache, ns):
    tip = store(cache, ns, TOKENS, CUTS)
    pin = cache.administration.pin
    for node, owner, seconds in ((ROOT_NODE, "a", 1), (tip, "", 1), (tip, "a", 0)):
        with pytest.raises(ValueError, match="pin"):
            pin(ns.id, node, owner, seconds)
    for owner, seconds in (("", 1), ("a", 0)):
        with pytest.raises(ValueError, match="must be"):
            Pin(owner, seconds)
    evict_all(cache)
    with pytest.raises(GoneError):
        pin(ns.id, tip, "a", 1)
    with pytest.raises(GoneError):
        pin("00" * 32, tip, "a", 1)


def test_a_pinned_point_and_what_it_needs_outlive_retention(cache, root):
    talk = Talk(cache, space(cache, ALL))
    talk.turn()
    pinned, tokens = talk.tip, list(talk.tokens)
    cache.administration.pin(talk.ns.id, pinned, "a", 3600)
    before = cache.path(talk.ns, pinned)[-1]
    for _ in range(12):
        talk.turn()
    node = cache.path(talk.ns, pinned)[-1]
    assert node.blobs == before.blobs
    assert node.kinds == before.kinds == {PointKind.REPLY}
    assert position(cache, talk.ns, tokens) == len(tokens)
    # Others of its age went: a pin keeps a point, not all that retention would take.
    talk.turn()
    assert len([kinds for _, kinds in talk.points() if PointKind.REPLY in kinds]) == 2
    cache.administration.unpin(talk.ns.id, pinned, "a")
    talk.turn()
    assert len([kinds for _, kinds in talk.points() if PointKind.REPLY in kinds]) == 1
    check_account(cache, root)


def test_damage_goes_in_spite_of_a_pin_and_takes_it_along(cache, ns, root):
    tip = store(cache, ns, TOKENS, CUTS, pin=Pin("a", 600))
    cache.report_damage(ns, cache.path(ns, tip)[0].blobs[0])
    assert rows(cache) == 0
    # The row's number is given to another node, which nobody pinned.
    store(cache, ns, TOKENS, CUTS, variant=1)
    assert cache.administration.pins() == []
    evict_all(cache)
    assert position(cache, ns, TOKENS) == 0
    check_account(cache, root)
