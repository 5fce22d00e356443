"""What one request may restore and leave behind; what a namespace's settings allow."""

import contextlib
import sqlite3

import attrs
import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.policy import NamespaceSettings, Tier
from kvport.snapshot.cache.records import Pin
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.requests import Generated

DAY = 86_400


def held(r):
    """Names and sizes of all below the root, and all rows but nodes' last uses."""
    r.engine.call(r.cache.flush)
    files = {
        (str(path.relative_to(r.cache_root)), path.lstat().st_size)
        for path in r.cache_root.rglob("*")
    }
    with contextlib.closing(sqlite3.connect(":memory:")) as copy:
        r.cache._index._connection.backup(copy)
        copy.execute("UPDATE node SET used = 0, at = 0, expires = 0")
        copy.execute("UPDATE root SET clock = 0")
        return files, list(copy.iterdump())


def tails(r):
    """Those that wait, once the engine has come to the end of its step."""
    return r.engine.call(lambda: list(r.engine._runners["m"]._tails._due))


def configure(r, **settings):
    r.cache.configure(r.namespace.id, NamespaceSettings(**settings))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "gemma3_text"])
def test_without_write_not_a_byte_is_left_behind(rig, prompt, arch):
    """A miss, a hit on disk, a hit in memory; also where one is cancelled."""
    r = rig(arch, reply_idle=3600.0, chunk=64, stride=128, block=64)
    tokens = prompt(300)
    whole = tokens + r.complete(tokens, max_tokens=70).tokens
    before, waiting = held(r), tails(r)
    assert len(waiting) == (arch != "llama"), "of whole rows nothing need wait"
    restored = [
        r.complete(asked, write=False, max_tokens=70).restored
        for asked in (prompt(300, seed=1), tokens, [*whole, 5], [*whole[:290], 6])
    ]
    assert restored[0] == 0
    assert restored[1:3] == [299, len(whole)]
    running = r.start(prompt(900, seed=2), write=False, max_tokens=10_000)
    while not isinstance(running.next(), Generated):
        pass
    running.ticket.cancel()
    running.answer()
    assert held(r) == before
    assert tails(r) == waiting
    assert r.engine.counts["m"].superseded_replies == 0
    assert r.cache.stats().leases == len(waiting)
    assert r.complete([*whole, 7]).restored == len(whole)
    r.engine.store_tails("m")
    assert held(r) != before


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_without_read_nothing_is_restored(rig, prompt, arch):
    """Neither from the disk nor from memory; what is computed is stored."""
    r = rig(arch, reply_idle=3600.0)
    tokens = prompt(300)
    whole = tokens + r.complete(tokens, max_tokens=40).tokens
    for asked in (tokens, [*whole, 5]):
        hot = r.complete(asked, full_logprobs=True, write=False)
        cold = r.complete(asked, full_logprobs=True, write=False, read=False)
        assert hot.restored > 0
        assert cold.restored == 0
        assert cold.tokens == hot.tokens
    assert r.complete(prompt(300, seed=1), read=False).restored == 0
    assert r.complete(prompt(300, seed=1)).restored == 299


def test_a_pinned_reply_is_stored_at_once(rig, prompt):
    """Its end is a part of what is pinned: it must not wait in memory."""
    r = rig("qwen3_5", reply_idle=3600.0)
    tokens = prompt(300)
    answer = r.complete(tokens, max_tokens=40, pin=Pin("night", DAY))
    assert not tails(r)
    r.cache.flush()
    boundary = r.engine.model("m").layout.blob(BlobClass.STATE, 1).size
    assert r.cache.stats().total.written[BlobClass.STATE] == 2 * boundary
    assert r.cache.stats().leases == 0
    whole = tokens + answer.tokens
    assert r.points(whole)[len(whole)] == {PointKind.REPLY}
    (pin,) = r.cache.administration.pins()
    assert (pin.owner, pin.tokens) == ("night", len(whole))
    assert DAY - 60 < pin.seconds_left <= DAY


@pytest.mark.parametrize("tier", [Tier.READ_ONLY, Tier.OFF])
def test_a_namespace_that_takes_nothing_stays_as_it_is(rig, prompt, tier):
    r = rig("qwen3_5", reply_idle=3600.0)
    tokens = prompt(300)
    tokens += r.complete(tokens, max_tokens=40).tokens
    r.engine.store_tails("m")
    before = held(r)
    configure(r, tier=tier)
    expected = 0 if tier is Tier.OFF else len(tokens)
    for _ in range(2):
        assert r.complete([*tokens, 1], max_tokens=40).restored == expected
    assert r.complete(prompt(300, seed=1), pin=Pin("night", DAY)).restored == 0
    assert not tails(r)
    assert held(r) == before
    configure(r)
    assert r.complete([*tokens, 1], max_tokens=40).restored == len(tokens)
    r.engine.store_tails("m")
    assert held(r) != before


def test_a_namespace_that_is_closed_while_a_reply_runs_gets_no_tail(rig, prompt):
    r = rig("qwen3_5", reply_idle=3600.0)
    running = r.start(prompt(300), max_tokens=100)
    while not isinstance(running.next(), Generated):
        pass
    configure(r, tier=Tier.OFF)
    running.answer()
    assert not tails(r)
    r.cache.flush()
    assert r.cache.stats().leases == 0


def test_what_is_set_of_a_namespace_goes_before_what_is_set_of_the_model(rig, prompt):
    """Of a conversation only the last reply stays, or the last three."""
    found = []
    for replies in (1, 3):
        r = rig("qwen3_5", home=str(replies), reply_idle=0.0)
        configure(r, retention=attrs.evolve(Retention(), replies=replies))
        turn = prompt(300)
        for seed in range(5):
            turn = turn + r.complete(turn, max_tokens=9).tokens + prompt(20, seed=seed)
            r.engine.store_tails("m")
            r.cache.flush()
        kinds = r.points(turn).values()
        found.append(sum(PointKind.REPLY in kind for kind in kinds))
    assert found == [1, 3]
