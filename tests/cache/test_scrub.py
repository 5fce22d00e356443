"""Scrubbing: damage is found before someone needs it, and nothing else is touched."""

import threading
import time

import pytest

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.scrub import Scrub
from kvport.snapshot.errors import StorageError
from tests.cache.builder import (
    ALL,
    DENSE,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    space,
    store,
)
from tests.cache.test_damage import ENDS, ODD, cut, extend, flip, remove
from tests.cache.test_tampering import OURS, TAMPERED, alter, filled

TOKENS = list(range(1000))


def scrub_of(cache, **options) -> Scrub:
    parts = (cache._index, cache._files, cache._reader, cache._lookup)
    return Scrub(*parts, **options)


class Stopping(threading.Event):
    """Set after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Waited(threading.Event):
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.waits = []

    def clock(self) -> float:
        return self.now

    def wait(self, timeout=None) -> bool:
        self.waits.append(timeout)
        self.now += timeout
        return self.is_set()


@pytest.mark.parametrize("layout", [DENSE, ALL])
@pytest.mark.parametrize("harm", [flip, cut, extend, remove, *ODD])
def test_a_damaged_blob_is_found_and_its_node_goes(root, layout, harm):
    removed = []
    with open_cache(root, removed=removed) as cache:
        ns = space(cache, layout)
        tip = store(cache, ns, TOKENS, ENDS)
        store(cache, ns, [7, *TOKENS], ENDS)
        blobs = 2 * len(ENDS) * len(layout.blob_classes)
        ref = cache.path(ns, tip)[1].blobs[-1]
        harm(root / "ns" / ns.id / ref.digest.hex())
        scrub = scrub_of(cache)
        assert scrub.progress.remaining == blobs
        scrub.run(None, threading.Event())
        progress = scrub.progress
        assert not progress.running
        assert progress.damaged == cache.stats().total.damaged == 1
        # Those of the nodes below went with it, before or after they were read.
        assert blobs - len(layout.blob_classes) * 2 < progress.checked <= blobs
        assert time.time() - progress.completed < 60
        reason = "missing" if harm is remove else "damaged"
        assert {(gone.end, gone.reason) for gone in removed} == {
            (end, reason) for end in ENDS[1:]
        }
        assert position(cache, ns, TOKENS) == ENDS[0]
        assert position(cache, ns, [7, *TOKENS]) == ENDS[-1]
        check_account(cache, root)
        again = scrub_of(cache)
        again.run(None, threading.Event())
        assert again.progress.damaged == 0


def test_it_goes_on_where_it_was_stopped_after_a_reopening_too(root):
    with open_cache(root) as cache:
        ns = space(cache)
        for number in range(4):
            store(cache, ns, [number, *TOKENS], ENDS)
        scrub = scrub_of(cache)
        # Two looks for each of the files, which are small.
        scrub.run(None, Stopping(2 * 5))
        assert scrub.progress.checked == 5
        assert scrub.progress.remaining == 7
        assert scrub.progress.completed is None
        scrub.run(None, Stopping(2 * 2 + 1))
        assert scrub.progress.checked == 7
        assert scrub.progress.nbytes == 7000
        # The first file is not looked at again before the next round.
        first = cache.path(ns, find(cache, ns, [0, *TOKENS]).tip)[0].blobs[0]
        flip(root / "ns" / ns.id / first.digest.hex())
        check_account(cache, root)
    with open_cache(root) as cache:
        scrub = scrub_of(cache)
        assert scrub.progress.remaining == 5
        scrub.run(None, threading.Event())
        assert (scrub.progress.checked, scrub.progress.damaged) == (5, 0)
        # Done; the next one begins anew, and says so before its thread does.
        assert scrub.progress.remaining == 0
        scrub.begin()
        began = scrub.progress
        assert (began.running, began.checked, began.remaining) == (True, 0, 12)
        scrub.run(None, threading.Event())
        assert scrub.progress.damaged == 1
        completed = scrub.progress.completed
    with open_cache(root) as cache:
        scrub = scrub_of(cache)
        assert scrub.progress.completed == completed
        scrub.run(None, Stopping(2))
        assert scrub.progress.completed == completed
        check_account(cache, root)


def test_a_killed_scrub_loses_seconds_only(cache, ns, root):
    for number in range(4):
        store(cache, ns, [number, *TOKENS], ENDS)
    stop = Waited()

    class KilledError(Exception):
        pass

    def kill(timeout):
        stop.now += timeout
        if stop.now > 135:
            raise KilledError

    stop.wait = kill
    # Four seconds each: after three files it stores how far it is.
    scrub = scrub_of(cache, clock=stop.clock)
    scrub._store = lambda done, real=scrub._store: stop.now < 135 and real(done)
    with pytest.raises(KilledError):
        scrub.run(250, stop)
    assert not scrub.progress.running
    ((scrubbed,),) = cache._index.all("SELECT scrubbed FROM root")
    assert scrubbed == 6


def test_it_reads_no_faster_than_it_may(cache, ns):
    sizes = [1000, 300_000, 5 * MIB, 10]
    for number, size in enumerate(sizes):
        store(cache, ns, [number, *TOKENS], [300], size=size)
    stop = Waited()
    scrub = scrub_of(cache, clock=stop.clock)
    scrub.run(1000, stop)
    assert stop.waits == pytest.approx([size / 1000 for size in sizes])
    assert scrub.progress.nbytes == sum(sizes)
    unlimited = Waited()
    scrub.run(None, unlimited)
    assert not unlimited.waits
    with pytest.raises(ValueError, match="rate"):
        scrub.run(0, stop)


def test_time_that_was_slept_through_is_not_made_up_for(cache, ns):
    for number in range(3):
        store(cache, ns, [number, *TOKENS], [300])
    stop = Waited()
    looks = iter([100.0, 100.0, 100.0, 100.0, *[9000.0] * 20])
    scrub = scrub_of(cache, clock=lambda: next(looks))
    scrub.run(100, stop)
    assert stop.waits == [10.0, 10.0, 20.0]


def test_stopping_ends_a_wait_at_once(cache, ns):
    store(cache, ns, TOKENS, ENDS)
    scrub, stop = scrub_of(cache), threading.Event()
    thread = threading.Thread(target=scrub.run, args=(1, stop))
    thread.start()
    while not scrub.progress.checked:
        time.sleep(0.001)
    assert scrub.progress.running
    # A second one leaves it alone.
    scrub.run(None, threading.Event())
    assert scrub.progress.checked == 1
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not scrub.progress.running


def test_what_cannot_be_opened_now_is_not_damage_and_is_read_again(
    cache, ns, root, monkeypatch
):
    tip = store(cache, ns, TOKENS, ENDS)
    scrub = scrub_of(cache)
    scrub.run(None, Stopping(2))

    def refuse(*_args):
        raise OSError(24, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(cache._files, "open", refuse)
        with pytest.raises(StorageError):
            scrub.run(None, threading.Event())
    assert scrub.progress.remaining == 2
    scrub.run(None, threading.Event())
    assert scrub.progress.checked == 3
    read_all(cache, ns, cache.path(ns, tip))
    check_account(cache, root)


def test_no_lock_is_held_while_a_file_is_read(cache, ns, monkeypatch):
    tip = store(cache, ns, TOKENS, ENDS)
    real, stored = cache._files.open, []

    def elsewhere():
        stored.append(store(cache, ns, [len(stored) + 1, *TOKENS], [300]))
        stored.append(position(cache, ns, TOKENS))

    def opening(*args):
        # Whoever stores, evicts or looks up is another thread.
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return real(*args)

    monkeypatch.setattr(cache._files, "open", opening)
    scrub_of(cache).run(None, threading.Event())
    assert len(stored) == 6
    read_all(cache, ns, cache.path(ns, tip))


def test_beside_stores_and_evictions_it_finds_no_damage(root):
    removed = []
    with open_cache(root, 6 * MIB, removed) as cache:
        ns = space(cache, ALL)
        scrub, stop = scrub_of(cache), threading.Event()
        rounds = []

        def scrubbing():
            while not stop.is_set():
                scrub.run(None, stop)
                rounds.append(scrub.progress)

        thread = threading.Thread(target=scrubbing)
        thread.start()
        try:
            for number in range(40):
                store(cache, ns, [number, *TOKENS], ENDS, size=40_000)
                match = find(cache, ns, [number, *TOKENS])
                read_all(cache, ns, match.nodes)
        finally:
            stop.set()
            thread.join(20)
        assert not thread.is_alive()
        assert {gone.reason for gone in removed} == {"evicted"}
        assert not cache.stats().total.damaged
        assert not scrub.progress.damaged
        assert len(rounds) > 1
        check_account(cache, root)


def test_an_empty_cache_is_scrubbed_at_once(cache, ns, root):
    scrub = scrub_of(cache)
    scrub.run(1, threading.Event())
    assert scrub.progress.completed is not None
    assert scrub.progress.remaining == scrub.progress.checked == 0
    check_account(cache, root)


def test_a_planted_row_is_found_and_goes_with_what_hangs_on_it(root):
    ns, _ = filled(root)
    alter(root, TAMPERED["kinds"])
    removed = []
    with open_cache(root, removed=removed, mac_key=OURS) as cache:
        scrub = scrub_of(cache)
        scrub.run(None, threading.Event())
        assert (scrub.progress.tampered, scrub.progress.damaged) == (1, 0)
        assert {(gone.end, gone.reason) for gone in removed} == {
            (end, "tampered") for end in ENDS[1:]
        }
        assert position(cache, ns, TOKENS) == ENDS[0]
        assert position(cache, ns, [7, *TOKENS]) == ENDS[-1]
        check_account(cache, root)
        scrub.run(None, threading.Event())
        assert scrub.progress.tampered == 0
