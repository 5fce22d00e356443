"""Models that come and go beside others that run."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from kvport.snapshot.engine import models
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.requests import Cancelled, Failed, Generated
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import (
    EngineStoppedError,
    ModelUnloadedError,
    UnknownModelError,
)
from tests.cache.builder import check_account


def active_bytes(r) -> int:
    r.engine.store_tails("m")
    r.cache.flush()
    r.engine.call(mx.clear_cache)
    return r.engine.call(mx.get_active_memory)


def await_token(running):
    while not isinstance(running.next(), Generated):
        pass


@pytest.fixture
def beside():
    """Runs something in a thread beside the test."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def test_unloading_frees_every_array(rig, prompt, model_dir):
    """The weights, those of the draft model, and what requests left."""
    r = rig()
    r.complete(prompt(300))
    tuning = Tuning(draft=DraftSource(model=model_dir("llama"), tokens=4))
    sizes, kept = [], []
    for _ in range(3):
        model = r.load("other", model_dir("llama", seed=1), tuning=tuning)
        running = r.start(prompt(300), name="other", max_tokens=20)
        running.answer()
        kept.append(running)  # whoever keeps a ticket does not keep the model
        nbytes = model.nbytes
        del model
        left = r.engine.unload("other")
        assert left.nbytes == 2 * nbytes
        sizes.append(active_bytes(r))
    assert sizes[0] == sizes[1] == sizes[2]


def test_counts_of_a_name_outlive_its_model(rig, prompt, model_dir):
    r = rig()
    r.complete(prompt(300), max_tokens=2)
    before = r.engine.counts["m"]
    assert before.requests == 1
    r.engine.unload("m")
    assert r.engine.counts == {"m": before}
    r.load("m", model_dir("llama", seed=1))
    assert r.engine.counts["m"] == before
    r.complete(prompt(300), name="m", max_tokens=2)
    assert r.engine.counts["m"].requests == 2


def test_its_requests_finish_and_new_ones_are_refused_at_once(rig, prompt, beside):
    r = rig("qwen3_5", batch=1)
    running = r.start(prompt(300), max_tokens=200)
    waiting = r.start(prompt(300, seed=2), max_tokens=3)
    await_token(running)
    unloading = beside(r.engine.unload, "m")
    while "m" in r.engine.models:
        time.sleep(0.001)
    with pytest.raises(UnknownModelError):
        r.start(prompt(30))
    assert not unloading.done()
    assert len(running.answer().tokens) == 200
    assert len(waiting.answer().tokens) == 3
    unloading.result(60)
    assert r.cache.stats().leases == 0


def test_what_was_in_memory_is_stored(rig, prompt, model_dir):
    r = rig("qwen3_5", reply_idle=3600.0)
    tokens = prompt(300)
    tokens += r.complete(tokens, max_tokens=40).tokens
    r.engine.unload("m")
    r.load("m", model_dir("qwen3_5"))
    assert r.complete([*tokens, 1]).restored == len(tokens)


def test_by_force_all_its_requests_end_with_the_reason(rig, prompt, model_dir):
    """One decodes, one is prefilled or prepared, one waits."""
    r = rig("qwen3_5", batch=2, reply_idle=3600.0)
    requests = [
        r.start(prompt(300 * seed, seed=seed), max_tokens=10_000)
        for seed in range(1, 5)
    ]
    await_token(requests[0])
    tokens = prompt(300, seed=1)
    r.engine.unload("m", force=True)
    for running in requests:
        with pytest.raises(ModelUnloadedError):
            running.answer()
    assert r.cache.stats().leases == 0
    r.load("m", model_dir("qwen3_5"))
    tokens += requests[0].answer_so_far.tokens
    assert r.complete([*tokens, 1]).restored == len(tokens), "what was captured stays"


def test_a_request_that_comes_at_the_same_moment_is_not_lost(rig, prompt, beside):
    """Accepted by the name, queued when the model had left: it gets an answer."""
    r = rig()
    asked = threading.Event()
    busy = beside(r.engine.call, lambda: asked.wait(60))
    unloading = beside(r.engine.unload, "m")
    while r.engine._inbox.empty():
        time.sleep(0.001)
    late = r.start(prompt(30))
    asked.set()
    assert busy.result(60)
    with pytest.raises(UnknownModelError):
        late.answer()
    unloading.result(60)


def test_b34_aborts_and_unloads_interleaved_leave_nothing(rig, prompt, model_dir):
    """A long prompt is cancelled while its model is unloaded, again and again."""
    r = rig("llama", chunk=64, stride=64, block=64)
    r.complete(prompt(100))
    sizes, endings = [], set()
    for turn in range(20):
        r.load("other", model_dir("qwen3_5"))
        running = r.start(prompt(1500, seed=turn), name="other", max_tokens=300)
        cancelling = threading.Timer(0.01 * (turn % 5), running.ticket.cancel)
        cancelling.start()
        r.engine.unload("other", force=turn % 2 == 1)
        cancelling.join()
        while not isinstance(event := running.next(), Cancelled | Failed):
            if isinstance(event, Generated) and event.finish:
                break
        endings.add(type(event))
        r.cache.flush()
        assert r.cache.stats().leases == 0
        sizes.append(active_bytes(r))
    assert len(set(sizes[1:])) == 1
    assert {Cancelled, Failed} <= endings
    assert r.complete(prompt(100)).restored == 99
    r.cache.flush()
    check_account(r.cache, r.cache_root)


def test_b36_one_model_that_goes_does_not_concern_another(rig, prompt, model_dir):
    """A small model comes to its idle limit while a large one works."""
    r = rig("qwen3_5", chunk=64, stride=64, block=64)
    tokens = prompt(300)
    r.complete(tokens)
    told = []
    r.engine._on_idle = told.append
    r.load("small", model_dir("llama"), keep_alive=0.05)
    small = r.complete(tokens, name="small").tokens
    running = r.start(prompt(300, seed=1), max_tokens=2_000)
    deadline = time.monotonic() + 60
    while "small" in r.engine.models and time.monotonic() < deadline:
        await_token(running)
    while not told and time.monotonic() < deadline:
        await_token(running)
    assert [left.name for left in told] == ["small"]
    running.ticket.cancel()
    assert running.answer().restored == 0
    assert r.complete(tokens).restored == 299
    r.load("small", model_dir("llama"))
    again = r.complete(tokens, name="small")
    assert (again.restored, again.tokens) == (299, small)
    assert not r.cache.stats().total.removed


def test_a_model_is_kept_while_it_is_used_and_gone_when_it_is_not(
    rig, prompt, model_dir
):
    r = rig()
    r.load("other", model_dir("qwen3_5"), keep_alive=3600)
    r.complete(prompt(30), name="other")
    running = r.start(prompt(300), name="other", max_tokens=10_000)
    await_token(running)
    r.engine.keep("other", 0.05)
    while time.monotonic() - running.began < 0.5:
        await_token(running)
    assert r.engine.served["other"].keep_alive == 0.05
    running.ticket.cancel()
    deadline = time.monotonic() + 60
    while "other" in r.engine.models and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(r.engine.models) == ["m"]


def test_replies_go_on_while_a_model_is_loaded(rig, prompt, model_dir, monkeypatch):
    """The engine reads a piece of weights, makes a step, reads the next piece."""
    monkeypatch.setattr(models, "_PART", 1)
    r = rig()
    running = r.start(prompt(30), max_tokens=100_000)
    await_token(running)
    while not running.events.empty():
        running.next()
    r.load("other", model_dir("qwen3_5"))
    assert running.events.qsize() > 5
    running.ticket.cancel()
    running.answer()


def test_an_engine_that_closes_ends_what_waits_for_an_unload(rig, prompt, beside):
    r = rig("qwen3_5")
    running = r.start(prompt(30), max_tokens=100_000)
    await_token(running)
    unloading = beside(r.engine.unload, "m")
    while "m" in r.engine.models:
        time.sleep(0.001)
    r.close()
    with pytest.raises(EngineStoppedError):
        unloading.result(60)
    assert isinstance(running.answer().ended, Cancelled)
