"""Requests side by side: order, limits, cancellation, failures, replies."""

import numpy as np
import pytest

from kvport.manifest.layout import BlobClass
from kvport.snapshot.engine.budget import footprint
from kvport.snapshot.engine.requests import (
    Cancelled,
    Generated,
    Policy,
    Sampling,
    Started,
)
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.errors import (
    BadPromptError,
    EngineFailureError,
    EngineStoppedError,
    OverloadedError,
    PromptTooLargeError,
    UnknownModelError,
)


def test_bad_prompts_are_refused_before_the_model_sees_them(rig):
    r = rig()
    for tokens in ([], [-1], [10**9], [r.engine.model("m").vocabulary]):
        with pytest.raises(BadPromptError):
            r.start(tokens)
    with pytest.raises(BadPromptError):
        r.start([1], max_tokens=0)
    with pytest.raises(UnknownModelError):
        r.start([1], name="nobody")


def test_requests_beyond_the_budget_wait_and_then_run(rig, prompt):
    r = rig()
    one = footprint(r.engine.model("m").layout, 512).batch([320])
    r.close()
    r = rig(live_bytes=one * 2, queue=3)
    running = [r.start(prompt(300, seed=i), max_tokens=20) for i in range(3)]
    assert isinstance(running[0].next(), Started)
    assert all(len(x.answer().tokens) == 20 for x in running)
    with pytest.raises(PromptTooLargeError):
        r.start(prompt(300), max_tokens=10_000)


def test_a_full_queue_refuses(rig, prompt):
    r = rig(queue=2, batch=1)
    first = r.start(prompt(300), max_tokens=200)
    while not isinstance(first.next(), Generated):
        pass
    waiting = [r.start(prompt(10)), r.start(prompt(10))]
    r.engine.call(lambda: None)  # both are in the runner's queue now
    with pytest.raises(OverloadedError):
        r.start(prompt(10))
    first.ticket.cancel()
    assert all(len(x.answer().tokens) == 4 for x in waiting)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_b31_cancellation_at_any_step_keeps_what_was_captured(rig, prompt, arch):
    r = rig(arch, chunk=256)
    tokens = prompt(1200)
    steps = iter(range(1, 40))
    restored = 0
    for wanted in (0, 1, 2, 3, 7):
        running = r.start(tokens[: 700 + next(steps)], max_tokens=500)
        seen = 0
        while seen < wanted:
            seen += isinstance(running.next(), Generated)
        running.ticket.cancel()
        running.ticket.cancel()
        answer = running.answer()
        assert isinstance(answer.ended, Cancelled)
        whole = tokens[: 700 + wanted] + answer.tokens
        r.cache.flush()
        restored = max(restored, answer.restored or 0)
        assert r.complete([*whole, 3]).restored >= restored
    assert (
        r.complete(tokens).tokens
        == rig(arch, home="b", chunk=256).complete(tokens).tokens
    )


def test_cancelled_reply_is_a_restore_point(rig, prompt):
    r = rig("qwen3_5")
    running = r.start(prompt(100), max_tokens=5000)
    for _ in range(10):
        running.next()
    running.ticket.cancel()
    answer = running.answer()
    whole = prompt(100) + answer.tokens
    assert r.complete([*whole, 1]).restored == len(whole)


def test_exact_requests_run_alone(rig, prompt):
    """Beside a neighbour, an exact request waits; its bits are those of a lone run."""
    options = {"max_tokens": 30, "full_logprobs": True, "policy": Policy.EXACT}
    alone = rig(home="b").complete(prompt(300), **options)
    r = rig()
    neighbour = r.start(prompt(200, seed=5), max_tokens=150)
    exact = r.start(prompt(300), **options)
    late = r.start(prompt(50, seed=6), max_tokens=5)
    assert np.array_equal(exact.answer().logprobs, alone.logprobs)
    assert neighbour.events.qsize() == 151, "it had ended before"
    late.answer()


def test_seeded_replies_do_not_depend_on_neighbours(rig, prompt):
    r = rig()
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    tokens = prompt(40)
    alone = r.complete(tokens, sampling=sampling, max_tokens=20).tokens
    others = [r.start(prompt(40, seed=i), max_tokens=30) for i in range(3)]
    assert r.complete(tokens, sampling=sampling, max_tokens=20).tokens == alone
    greedy = r.complete(tokens, max_tokens=20).tokens
    assert greedy != alone
    for other in others:
        other.answer()


def test_stop_texts_end_the_reply_and_are_not_part_of_it(rig, prompt):
    r = rig("qwen3_5")
    tokens = prompt(40)
    full = r.complete(tokens, max_tokens=40)
    stop = full.text[10:13]
    cut = r.complete(tokens, max_tokens=40, stop_texts=[stop, "never"])
    assert cut.finish == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    whole = tokens + cut.tokens
    assert r.complete([*whole, 1]).restored == len(whole)


def test_logprobs_are_reported_with_alternatives(rig, prompt):
    r = rig()
    running = r.start(prompt(20), top_logprobs=3, full_logprobs=True)
    events = []
    while not events or events[-1].finish is None:
        event = running.next()
        if isinstance(event, Generated):
            events.append(event)
    for event in events:
        order = np.argsort(-event.full)[:3]
        assert [t.token for t in event.top] == order.tolist()
        assert event.logprob == event.full[event.token] == event.top[0].logprob
        assert abs(np.exp(event.full.astype(np.float64)).sum() - 1) < 1e-4


def test_a_failing_model_fails_its_requests_only(rig, prompt, model_dir):
    r = rig()
    r.load("other", model_dir("qwen3_5"))
    module = r.engine.model("m").module
    real = module.lm_head

    def broken(*_args, **_options):
        raise RuntimeError("[metal] out of memory")

    other = r.start(prompt(300), name="other", max_tokens=30)
    r.engine.call(lambda: setattr(module, "lm_head", broken))
    failing = r.start(prompt(30))
    with pytest.raises(EngineFailureError):
        failing.answer()
    assert len(other.answer().tokens) == 30
    r.engine.call(lambda: setattr(module, "lm_head", real))
    assert len(r.complete(prompt(30)).tokens) == 4


def test_close_ends_everything_and_keeps_the_prompt(rig, prompt):
    r = rig("qwen3_5")
    running = r.start(prompt(600), max_tokens=5000)
    while not isinstance(running.next(), Generated):
        pass
    r.close()
    assert isinstance(running.answer().ended, Cancelled)
    with pytest.raises(EngineStoppedError):
        r.start(prompt(10))
    assert rig("qwen3_5").complete(prompt(600)).restored == 599


def test_a_failing_start_leaves_no_thread(rig, monkeypatch):
    from kvport.snapshot.engine import scheduler
    from kvport.snapshot.errors import EngineConformanceError

    def refuse():
        raise EngineConformanceError("for the test")

    monkeypatch.setattr(scheduler, "conformance", refuse)
    with pytest.raises(EngineConformanceError):
        Engine(scheduler.Tuning())


def test_footprint_counts_padding(rig):
    layout = rig("gemma3_text").engine.model("m").layout
    found = footprint(layout, 512)
    kv = layout.blob(BlobClass.KV, 1)
    assert found.per_row == kv.size - len(kv.header)
    assert found.batch([100, 10]) == 2 * (found.fixed + 100 * found.per_row)


def test_b02_a_failing_capture_costs_speed_only(rig, prompt, monkeypatch):
    """The reply is whole, what was captured before restores, the failure is counted."""
    from kvport.snapshot.engine import capture

    r = rig("qwen3_5", chunk=256)
    tokens = prompt(1000)
    expected = r.complete(tokens, write=False, max_tokens=8).tokens
    real, calls = capture.take, []

    def failing(*args, **options):
        calls.append(options["held"])
        if options["held"] > 600:
            raise RuntimeError("[malloc] no memory")
        return real(*args, **options)

    monkeypatch.setattr(capture, "take", failing)
    assert r.complete(tokens, max_tokens=8).tokens == expected
    assert calls == [256, 512, 768], "after a failure nothing more is tried"
    assert r.engine.counts["m"].failed_captures == 1
    monkeypatch.undo()
    assert r.complete(tokens, max_tokens=8).tokens == expected
    assert r.complete(tokens).restored == 999


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-38, 1e-9])
def test_the_coldest_temperatures_are_greedy(rig, prompt, temperature):
    r = rig()
    greedy = r.complete(prompt(40), max_tokens=20).tokens
    cold = Sampling(temperature=temperature, seed=3)
    assert r.complete(prompt(40), sampling=cold, max_tokens=20).tokens == greedy
    narrow = Sampling(temperature=1.0, top_p=1e-300, seed=3)
    assert r.complete(prompt(40), sampling=narrow, max_tokens=20).tokens == greedy


def test_state_that_cannot_be_read_is_computed(rig, prompt, monkeypatch):
    """Too many open files, a volume that fails: slower, and never an error."""
    from kvport.snapshot.errors import StorageError

    r = rig("qwen3_5")
    expected = r.complete(prompt(600)).tokens

    def refuse(*_):
        raise StorageError("for the test")

    monkeypatch.setattr(r.cache, "read", refuse)
    again = r.complete(prompt(600))
    assert (again.restored, again.tokens) == (0, expected)
    monkeypatch.undo()
    assert r.complete(prompt(600)).restored == 599


@pytest.mark.parametrize("arch", ["gemma2", "llama4", "llama"])
def test_unequal_lengths_side_by_side_answer_like_alone(rig, prompt, arch):
    """Whether they share a batch or run one after the other: replies and state."""
    r = rig(arch)
    prompts = [prompt(n, seed=n) for n in (300, 40, 130, 77)]
    running = [r.start(p, max_tokens=40, full_logprobs=True) for p in prompts]
    answers = [x.answer() for x in running]
    fresh = rig(arch, home="b")
    for tokens, answer in zip(prompts, answers, strict=True):
        alone = fresh.complete(tokens, max_tokens=40, full_logprobs=True)
        assert np.abs(answer.logprobs - alone.logprobs).max() < 1e-3
        whole = [*tokens, *answer.tokens, 5]
        later = r.complete(whole, full_logprobs=True)
        cold = fresh.complete(whole, read=False, full_logprobs=True)
        assert later.restored == len(whole) - 1
        assert np.abs(later.logprobs - cold.logprobs).max() < 1e-3
