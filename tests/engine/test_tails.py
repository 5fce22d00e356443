"""The end of a reply: in memory until the next turn, or until it is stored."""

import time

import numpy as np
import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.clock import boot_seconds
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.engine import tails
from kvport.snapshot.engine.requests import Generated, Policy, Sampling
from kvport.snapshot.errors import EngineStoppedError
from tests.cache.builder import Time, check_account, remove_ended

STATEFUL = ["qwen3_5", "gemma3_text", "falcon_h1"]


def written(rig, blob_class):
    rig.cache.flush()
    return rig.cache.stats().total.written.get(blob_class, 0)


@pytest.mark.parametrize("arch", STATEFUL)
def test_the_next_turn_begins_at_a_tail_like_at_a_stored_point(rig, prompt, arch):
    """From memory or from disk: the same restore point, the same bits."""
    tokens, more = prompt(300), prompt(40, seed=2)
    first, second = rig(arch), rig(arch, home="b")
    turn = tokens + first.complete(tokens, max_tokens=70).tokens
    assert second.complete(tokens, max_tokens=70).tokens == turn[300:]
    in_memory = first.complete(turn + more, full_logprobs=True)
    assert first.engine.counts["m"].superseded_replies == 1
    assert in_memory.restored == len(turn)

    assert second.points(turn)[len(turn)] == {PointKind.REPLY}, "a lookup stores it"
    second.close()
    again = rig(arch, home="b").complete(turn + more, full_logprobs=True)
    assert again.restored == len(turn)
    assert np.array_equal(in_memory.logprobs, again.logprobs)


@pytest.mark.parametrize("arch", STATEFUL)
def test_what_follows_a_superseded_tail_survives_a_restart(rig, prompt, arch):
    """Its rows are stored with the next turn, and all later points restore."""
    r = rig(arch)
    turn = prompt(300)
    for seed in range(1, 5):
        turn += r.complete(turn, max_tokens=70).tokens
        turn += prompt(30, seed=seed)
    hot = r.complete(turn, full_logprobs=True)
    assert hot.restored == len(turn) - 30
    r.close()
    r = rig(arch)
    warm = r.complete(turn, full_logprobs=True)
    assert warm.restored == len(turn) - 1
    assert warm.tokens == hot.tokens


def test_a_superseded_reply_has_no_boundary_on_disk(rig, prompt):
    r = rig("qwen3_5")
    turn, boundaries = prompt(300), []
    for seed in range(4):
        turn += r.complete(turn, max_tokens=70).tokens + prompt(30, seed=seed)
        boundaries.append(written(r, BlobClass.STATE))
    assert np.diff(boundaries).tolist() == [boundaries[0]] * 3, "one point each turn"
    r.engine.store_tails("m")
    assert written(r, BlobClass.STATE) == 5 * boundaries[0]
    assert r.engine.counts["m"].superseded_replies == 3


def test_b09_a_reply_that_the_template_strips_is_not_stored(rig, prompt):
    """Thinking: the next turn parts at the fork; the skip has a count of its own."""
    r = rig("qwen3_5")
    turn1, fork = prompt(600), 590
    r.complete(turn1, max_tokens=300, fork=fork)
    before = written(r, BlobClass.STATE)
    turn2 = turn1[:fork] + prompt(300, seed=2)
    assert r.complete(turn2, fork=880, max_tokens=1).restored == fork
    after = written(r, BlobClass.STATE)
    assert after - before == before, "fork and prompt of either turn, and no reply"
    assert r.engine.counts["m"].superseded_replies == 1


def test_the_same_prompt_again_supersedes_nothing(rig, prompt):
    r = rig("qwen3_5")
    tokens = prompt(300)
    whole = tokens + r.complete(tokens, max_tokens=20, fork=290).tokens
    r.complete(tokens, max_tokens=3, fork=290)
    assert r.engine.counts["m"].superseded_replies == 0
    assert r.points(whole)[320] == {PointKind.REPLY}


@pytest.mark.parametrize("arch", STATEFUL)
def test_many_may_begin_at_one_tail(rig, prompt, arch):
    """Ten forks of one history, the first of which supersedes it."""
    r = rig(arch)
    history = prompt(300)
    history += r.complete(history, max_tokens=50).tokens
    running = [r.start(history + prompt(20, seed=s)) for s in range(3)]
    first, *others = [x.answer().restored for x in running]
    assert first == len(history)
    assert all(restored >= 299 for restored in others)


@pytest.mark.parametrize("idle", [5.0, 0.0])
@pytest.mark.parametrize("fork", [None, 299])
@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_5", "baichuan_m1"])
def test_two_samples_of_a_prompt_go_on_each_by_itself(rig, prompt, arch, fork, idle):
    """What one conversation prunes, or supersedes, is not what the other stands on."""
    r = rig(arch, reply_idle=idle)
    asked = prompt(300)
    sampling = Sampling(temperature=1.5, seed=3)
    replies = [
        r.start(asked, max_tokens=40, fork=fork),
        r.start(asked, max_tokens=41, fork=fork, sampling=sampling),
    ]
    one, other = (asked + reply.answer().tokens for reply in replies)
    for seed in range(3):
        other += prompt(9, seed=seed)
        other += r.complete(list(other), fork=fork and len(other) - 1).tokens
    r.cache.flush()
    hot = r.complete([*one, 7], write=False, full_logprobs=True)
    assert hot.restored == len(one)
    r.close()
    warm = rig(arch).complete([*one, 7], write=False, full_logprobs=True)
    assert warm.restored == len(one)
    assert np.array_equal(hot.logprobs, warm.logprobs)


@pytest.mark.parametrize("arch", ["gemma3_text", "baichuan_m1"])
def test_a_reply_that_goes_on_while_its_sibling_prunes(rig, prompt, arch):
    """Its rows wait in memory; those before them stay stored."""
    r = rig(arch, reply_idle=0.0)
    asked = prompt(300)
    long = r.start(asked, max_tokens=150)
    while not isinstance(long.next(), Generated):
        pass
    other = asked
    for seed in range(3):
        other = [*other, *prompt(60, seed=seed)]
        other += r.complete(list(other), max_tokens=3).tokens
    whole = asked + long.answer().tokens
    assert r.complete([*whole, 7], write=False).restored == len(whole)
    r.close()
    assert rig(arch).complete([*whole, 7]).restored == len(whole)


def test_a_request_that_writes_nothing_supersedes_nothing(rig, prompt):
    r = rig("qwen3_5")
    tokens = prompt(300)
    tokens += r.complete(tokens, max_tokens=50).tokens
    reader = r.complete(tokens + prompt(20, seed=2), write=False)
    assert reader.restored == len(tokens)
    assert r.engine.counts["m"].superseded_replies == 0
    assert r.complete(tokens + prompt(20, seed=3), read=False).restored == 0


def test_exact_does_not_begin_at_a_tail(rig, prompt):
    r = rig("qwen3_5", chunk=256)
    tokens = prompt(300)
    tokens += r.complete(tokens, max_tokens=50, policy=Policy.EXACT).tokens
    assert r.complete([*tokens, 1, 2], policy=Policy.EXACT).restored == 0


def test_a_tail_is_stored_after_a_while(rig, prompt):
    """Without another request: the engine wakes up by itself."""
    r = rig("qwen3_5", reply_idle=0.05)
    r.complete(prompt(300), max_tokens=50)
    one = written(r, BlobClass.STATE)
    deadline = time.monotonic() + 60
    while written(r, BlobClass.STATE) == one and time.monotonic() < deadline:
        time.sleep(0.01)
    assert written(r, BlobClass.STATE) == 2 * one


def test_tails_have_a_bound(rig, prompt, monkeypatch):
    """Beyond it the oldest is stored at once."""
    r = rig("qwen3_5", reply_idle=3600.0)
    r.complete(prompt(300), max_tokens=20)
    one = written(r, BlobClass.STATE)
    monkeypatch.setattr(tails, "_BYTES", 100_000)
    r.complete(prompt(300, seed=2), max_tokens=20)
    r.complete(prompt(300, seed=3), max_tokens=20)
    assert written(r, BlobClass.STATE) > 3 * one
    r.close()
    r = rig("qwen3_5")
    assert r.cache.stats().total.removed == {}


@pytest.mark.parametrize("arch", [*STATEFUL, "llama"])
@pytest.mark.parametrize("generated", [212, 211, 213])
def test_replies_that_end_at_a_block_end(rig, prompt, arch, generated):
    """The last rows were taken at the step before it was known to be the last."""
    r = rig(arch)
    tokens = prompt(300)
    whole = tokens + r.complete(tokens, max_tokens=generated).tokens
    r.close()
    r = rig(arch)
    assert r.complete([*whole, 5, 6]).restored == len(whole)


@pytest.mark.parametrize("arch", [*STATEFUL, "llama"])
def test_cancelled_at_any_step(rig, prompt, arch):
    """What was generated is a restore point, at a block end too."""
    r = rig(arch, block=16, chunk=64, stride=128)
    for steps in range(1, 20, 3):
        tokens = prompt(100, seed=steps)
        running = r.start(tokens, max_tokens=10_000)
        events = []
        while sum(isinstance(e, Generated) for e in events) < steps:
            events.append(running.next())
        running.ticket.cancel()
        whole = tokens + running.answer().tokens
        again = r.complete([*whole, 5, 6])
        assert again.restored == len(whole)


def test_a_broken_chain_costs_speed_only(rig, prompt):
    """The rows before the tail were removed: the answer is computed."""
    r = rig("qwen3_5")
    tokens = prompt(300)
    whole = tokens + r.complete(tokens, max_tokens=20).tokens
    cold = rig("qwen3_5", home="b").complete([*whole, 5])
    for path in r.cache_root.glob("ns/*/*"):
        path.chmod(0o600)
        path.write_bytes(b"")
    again = r.complete([*whole, 5])
    assert again.restored == 0
    assert again.tokens == cold.tokens


def test_an_engine_that_was_shut_down_says_so(rig, prompt):
    """An export that comes too late must not wait for ever."""
    r = rig("qwen3_5")
    r.complete(prompt(30))
    r.engine.close()
    with pytest.raises(EngineStoppedError):
        r.engine.store_tails("m")


# A reply's end that expires while it waits.


@pytest.fixture
def clock():
    return Time()


def timed(rig, arch, clock, **tuning):
    """A rig by a clock of its own, where tails wait until they are asked for."""
    made = rig(arch, clocks=clock.clocks, reply_idle=3600.0, **tuning)
    made.cache._maintenance.stop(60)
    return made


@pytest.mark.parametrize("arch", STATEFUL)
def test_a_tail_that_expired_in_memory_is_not_stored(rig, prompt, arch, clock):
    """Nor what it hangs on revived: a probe and an export store tails first."""
    r = timed(rig, arch, clock)
    whole = prompt(300)
    whole += r.complete(whole, max_tokens=70, ttl=60).tokens
    r.cache.flush()
    before = r.cache.stats().total.written_bytes
    clock.passes(60)
    assert r.complete([*whole, 7], write=False).restored == 0, "from memory"
    assert r.match([*whole, 7]) is None
    skipped = r.cache.stats().total.skipped
    assert set(skipped) == {SkipReason.EXPIRED}
    assert skipped[SkipReason.EXPIRED] >= 1
    assert r.cache.stats().total.written_bytes == before
    assert r.cache.stats().leases == 0
    assert r.complete([*whole, 7], write=False).restored == 0
    assert remove_ended(r.cache) > 0
    check_account(r.cache, r.cache_root)


@pytest.mark.parametrize("arch", STATEFUL)
@pytest.mark.parametrize("later", [19, 20])
def test_the_life_of_a_tail_begins_with_the_end_of_its_reply(
    rig, prompt, arch, clock, later
):
    """Stored 40 s after it, with 60 s to live."""
    r = timed(rig, arch, clock)
    whole = prompt(300)
    whole += r.complete(whole, max_tokens=70, ttl=60).tokens
    clock.passes(40)
    r.engine.store_tails("m")
    r.cache.flush()
    assert not r.cache.stats().total.skipped
    clock.passes(later)
    restored = r.complete([*whole, 7], write=False).restored
    assert restored == (len(whole) if later < 20 else 0)


@pytest.mark.parametrize("arch", STATEFUL)
def test_a_namespaces_ttl_holds_for_tails_too(rig, prompt, arch, clock):
    r = timed(rig, arch, clock)
    r.cache.configure(r.namespace.id, NamespaceSettings(ttl=60))
    whole = prompt(300)
    whole += r.complete(whole, max_tokens=70).tokens
    clock.passes(60)
    r.engine.store_tails("m")
    assert r.complete([*whole, 7], write=False).restored == 0
    assert set(r.cache.stats().total.skipped) == {SkipReason.EXPIRED}


@pytest.mark.parametrize("arch", STATEFUL)
def test_a_hit_in_memory_renews_a_tail(rig, prompt, arch, clock):
    r = timed(rig, arch, clock)
    whole = prompt(300)
    whole += r.complete(whole, max_tokens=70, ttl=60).tokens
    for _ in range(3):
        clock.passes(50)
        assert r.complete([*whole, 7], write=False).restored == len(whole)
    clock.passes(30)
    r.engine.store_tails("m")
    clock.passes(29)
    assert r.complete([*whole, 7], write=False).restored == len(whole)


@pytest.mark.parametrize("arch", ["llama", *STATEFUL])
def test_a_request_uses_what_it_stored_until_its_reply_ends(rig, prompt, arch, clock):
    """The prompt's end, where a template drops the reply, lives as long as that."""
    r = timed(rig, arch, clock)
    tokens = prompt(300)
    running = r.start(tokens, max_tokens=10_000, ttl=60)
    while not isinstance(running.next(), Generated):
        pass
    r.cache.flush()
    clock.passes(50)
    running.ticket.cancel()
    running.answer()
    clock.passes(50)
    assert r.complete([*tokens, 7], write=False).restored >= 299


def test_a_tail_is_due_by_a_clock_that_counts_sleep(rig, prompt, clock):
    """The wait of a machine that slept is over when it wakes."""
    assert tails.Tails(5.0)._clock is boot_seconds
    r = timed(rig, "qwen3_5", clock)
    runner = r.engine._runners["m"]
    waiting = tails.Tails(5.0, clock.clocks.boot)
    r.engine.call(lambda: setattr(runner, "_tails", waiting))
    r.complete(prompt(300), max_tokens=50)
    assert r.engine.call(lambda: waiting.wait) == 5.0
    one = written(r, BlobClass.STATE)
    clock.passes(5)
    r.engine.call(lambda: waiting.store_due(lambda _: False))
    assert written(r, BlobClass.STATE) == 2 * one
