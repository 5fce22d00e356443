"""How the demonstration compares answers."""

import attrs
import pytest

from kvport.api.demo.answers import Answer, identical, max_difference


def step(token: str, logprob: float, **top: float) -> dict:
    alternatives = [{"token": t, "logprob": value} for t, value in top.items()]
    return {"token": token, "logprob": logprob, "top_logprobs": alternatives}


def answer(*steps: dict, restored: int = 9) -> Answer:
    return Answer(
        ttft_s=1.0,
        prompt_tokens=10,
        restored_tokens=restored,
        text="".join(one["token"] for one in steps),
        steps=steps,
    )


HOT = answer(step("a", -0.5, a=-0.5, b=-1.5), step("b", -0.25, b=-0.25, c=-2.0))


def test_equal_answers_are_identical():
    again = answer(step("a", -0.5, a=-0.5, b=-1.5), step("b", -0.25, b=-0.25, c=-2.0))
    assert identical(HOT, attrs.evolve(again, ttft_s=2.0))
    assert max_difference(HOT, again) == 0


def test_another_restore_point_is_not_identical():
    assert not identical(HOT, attrs.evolve(HOT, restored_tokens=8))


@pytest.mark.parametrize(
    "last",
    [
        step("b", -0.2500001, b=-0.25, c=-2.0),
        step("b", -0.25, b=-0.25, c=-2.0000001),
        step("b", -0.25, b=-0.25),
        step("c", -0.25, b=-0.25, c=-2.0),
    ],
)
def test_any_other_number_or_token_is_not_identical(last):
    assert not identical(HOT, answer(HOT.steps[0], last))


def test_a_shorter_answer_is_not_identical():
    assert not identical(HOT, answer(HOT.steps[0]))


def test_the_difference_is_the_largest_over_alternatives_and_steps():
    cold = answer(step("a", -0.5, a=-0.5, b=-1.75), step("b", -0.375, b=-0.375, c=-2.5))
    assert max_difference(HOT, cold) == 0.5


def test_the_difference_leaves_out_what_follows_where_replies_part():
    tail = step("x", -3.0, x=-3.0)
    left = answer(step("a", -0.5, a=-0.5, b=-0.75), tail)
    right = answer(step("b", -0.625, a=-0.75, b=-0.625), step("x", -9.0, x=-9.0))
    assert max_difference(left, right) == 0.25


def test_tokens_that_only_one_side_reports_do_not_count():
    assert max_difference(HOT, answer(step("a", -0.5, a=-0.5, z=-7.0))) == 0
