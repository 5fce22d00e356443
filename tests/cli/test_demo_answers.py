"""How the demonstration compares answers, and when it fails."""

import attrs
import pytest

from kvport.api.demo.answers import identical, max_difference
from kvport.api.demo.story import Outcome
from kvport.api.results import Completion, Logprob

Step = tuple[int, float, dict[str, float]]
"""Token, its log-probability, and the likeliest ones."""


def answer(*steps: Step) -> Completion:
    return Completion(
        text="",
        tokens=tuple(token for token, _, _ in steps),
        logprobs=tuple(logprob for _, logprob, _ in steps),
        top_logprobs=tuple(
            tuple(Logprob(token=text, logprob=one) for text, one in top.items())
            for _, _, top in steps
        ),
        finish_reason="length",
        prompt_tokens=10,
        cached_tokens=9,
        ttft_s=1.0,
        total_s=2.0,
    )


FIRST: Step = (1, -0.5, {"a": -0.5, "b": -1.5})
SECOND: Step = (2, -0.25, {"b": -0.25, "c": -2.0})
HOT = answer(FIRST, SECOND)


def test_equal_answers_are_identical_whatever_they_took():
    again = attrs.evolve(answer(FIRST, SECOND), ttft_s=3.0, total_s=4.0)
    assert identical(HOT, again)
    assert max_difference(HOT, again) == 0


def test_another_restore_point_is_not_identical():
    assert not identical(HOT, attrs.evolve(HOT, cached_tokens=8))


@pytest.mark.parametrize(
    "second",
    [
        (2, -0.2500001, {"b": -0.25, "c": -2.0}),
        (2, -0.25, {"b": -0.25, "c": -2.0000001}),
        (2, -0.25, {"b": -0.25}),
        (3, -0.25, {"b": -0.25, "c": -2.0}),
    ],
)
def test_any_other_number_or_token_is_not_identical(second):
    assert not identical(HOT, answer(FIRST, second))


def test_a_shorter_answer_is_not_identical():
    assert not identical(HOT, answer(FIRST))


def test_the_difference_is_the_largest_over_alternatives_and_steps():
    cold = answer(
        (1, -0.5, {"a": -0.5, "b": -1.75}), (2, -0.375, {"b": -0.375, "c": -2.5})
    )
    assert max_difference(HOT, cold) == 0.5


def test_the_difference_leaves_out_what_follows_where_replies_part():
    left = answer((1, -0.5, {"a": -0.5, "b": -0.75}), (9, -3.0, {"x": -3.0}))
    right = answer((2, -0.625, {"a": -0.75, "b": -0.625}), (9, -9.0, {"x": -9.0}))
    assert max_difference(left, right) == 0.25


def test_tokens_that_only_one_side_reports_do_not_count():
    assert max_difference(HOT, answer((1, -0.5, {"a": -0.5, "z": -7.0}))) == 0


PASSED = Outcome(
    model="llama",
    cold_ttft_s=2.0,
    hot_ttft_s=0.1,
    imported_ttft_s=0.1,
    artifact_bytes=1000,
    export_s=0.1,
    import_s=0.1,
    prompt_tokens=600,
    restored_tokens=599,
    identical_to_hot=True,
    max_diff_to_cold=1e-6,
    next_turn_tokens=700,
    next_turn_restored_tokens=632,
)


@pytest.mark.parametrize(
    "change",
    [
        {"identical_to_hot": False},
        {"restored_tokens": 598},
        {"next_turn_restored_tokens": 512},
    ],
)
def test_the_demonstration_fails_on_less_than_was_promised(change):
    assert PASSED.passed
    assert not attrs.evolve(PASSED, **change).passed
