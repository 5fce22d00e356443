"""Transfers whose other side is slow: what is not held any more is not sent."""

import pytest

from kvport.snapshot.cache.leases import LEASE_SECONDS
from kvport.snapshot.errors import GoneError
from kvport.snapshot.transfer.exporter import STALLED
from tests.cache.builder import Time, check_account
from tests.transfer.test_refusals import split
from tests.transfer.world import TOKENS


@pytest.fixture
def time():
    return Time()


def test_b77_a_stalled_export_ends_and_sends_nothing_of_what_came_after(home, time):
    """A transfer is throttled past its lease; meanwhile the room is used again."""
    a = home("a", clocks=time.clocks)
    a.store()
    opened = a.open_export()
    pieces = opened.stream()
    sent = next(pieces)
    time.passes(STALLED - 1)
    sent += next(pieces)
    [lease] = a.cache.administration.leases()
    assert (lease.owner, lease.tokens, lease.reading) == ("export", 11, True)
    assert lease.seconds_left == STALLED
    time.passes(STALLED)
    assert not a.cache.administration.leases()
    a.cache.administration.clear()
    a.store(variant="other bytes under the same tokens")
    with pytest.raises(GoneError):
        sent += next(pieces)
    assert len(sent) < opened.size
    assert a.cache.stats().total.damaged == 0
    check_account(a.cache, a.directory / "cache")


def test_b77_a_stalled_export_ends_even_if_nothing_was_removed(home, time):
    a = home("a", clocks=time.clocks)
    a.store()
    opened = a.open_export()
    pieces = opened.stream()
    next(pieces)
    time.passes(STALLED)
    with pytest.raises(GoneError):
        next(pieces)
    assert len(a.export()) == opened.size


def test_a_slow_export_is_held_as_long_as_it_goes_on(home, time):
    a, b = home("a", clocks=time.clocks), home("b")
    b.trusted.append(a.key)
    a.store()
    slow = b""
    for piece in a.open_export().stream():
        time.passes(STALLED - 1)
        a.cache._evictor.free(1 << 60)
        slow += piece
    assert b.take(slow).restored_tokens == 11
    assert not a.cache.administration.leases()


def test_an_export_that_was_never_read_holds_for_an_hour_at_most(home, time):
    a = home("a", clocks=time.clocks)
    a.store()
    opened = a.open_export()
    time.passes(LEASE_SECONDS)
    a.cache._evictor.free(1 << 60)
    assert a.match() is None
    with pytest.raises(GoneError):
        next(opened.stream())


@pytest.mark.parametrize("seconds", [LEASE_SECONDS - 1, LEASE_SECONDS])
def test_an_upload_is_refused_when_what_is_stored_is_not_held_any_more(
    home, time, seconds
):
    a, b = home("a"), home("b", clocks=time.clocks)
    a.store()
    b.trusted.append(a.key)
    data = a.export()
    b.take(a.export(TOKENS[:10]))
    running = b.start_import()
    parts = split(data)
    middle = parts[3].next
    running.feed(data[:middle])
    [lease] = b.cache.administration.leases()
    assert lease.owner.startswith("import ")
    time.passes(seconds)
    if seconds < LEASE_SECONDS:
        running.feed(data[middle:])
        assert running.finish().restored_tokens == 11
    else:
        with pytest.raises(GoneError):
            running.feed(data[middle:])
        running.abort()
    check_account(b.cache, b.directory / "cache")
