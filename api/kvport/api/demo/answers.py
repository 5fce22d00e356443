"""One answer as the demonstration sees it, and how two of them compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

Step = Mapping[str, Any]
"""A token of the reply with its reported log-probabilities, as the server writes it:
`token`, `logprob`, and `top_logprobs`, a list of the same for the likeliest tokens."""


@attrs.frozen(kw_only=True)
class Answer:
    """What a server answered.

    Attributes:
        ttft_s: seconds from the request to the first token.
        prompt_tokens: length of the prompt.
        restored_tokens: of these, restored and not computed.
        text: the reply.
        steps: its tokens.
    """

    ttft_s: float
    prompt_tokens: int
    restored_tokens: int
    text: str
    steps: Sequence[Step]


def identical(left: Answer, right: Answer) -> bool:
    """Whether both went on from the same point, and to exactly the same numbers."""
    same_point = left.restored_tokens == right.restored_tokens
    return same_point and list(left.steps) == list(right.steps)


def max_difference(left: Answer, right: Answer) -> float:
    """Largest absolute difference of reported log-probabilities.

    Compared are the tokens that both report at a step, up to and including the first
    step at which the replies part: beyond it the contexts differ.
    """
    largest = 0.0
    for mine, theirs in zip(left.steps, right.steps, strict=False):
        ours, other = _reported(mine), _reported(theirs)
        shared = ours.keys() & other.keys()
        largest = max([largest, *(abs(ours[one] - other[one]) for one in shared)])
        if mine["token"] != theirs["token"]:
            break
    return largest


def _reported(step: Step) -> dict[str, float]:
    return {one["token"]: one["logprob"] for one in (step, *step["top_logprobs"])}
