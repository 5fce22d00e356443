"""How the demonstration compares what two servers answered."""

from kvport.api.results import Completion, Logprob


def identical(left: Completion, right: Completion) -> bool:
    """Whether both went on from the same point, and to exactly the same numbers."""
    return (
        left.cached_tokens == right.cached_tokens
        and left.tokens == right.tokens
        and left.logprobs == right.logprobs
        and left.top_logprobs == right.top_logprobs
    )


def max_difference(left: Completion, right: Completion) -> float:
    """Largest absolute difference of reported log-probabilities.

    Compared are the tokens that both report at a step, up to and including the first
    step at which the replies part: beyond it the contexts differ.
    """
    largest = 0.0
    steps = zip(
        left.tokens, right.tokens, left.top_logprobs, right.top_logprobs, strict=False
    )
    for mine, theirs, my_top, their_top in steps:
        ours, other = _by_token(my_top), _by_token(their_top)
        shared = ours.keys() & other.keys()
        largest = max([largest, *(abs(ours[one] - other[one]) for one in shared)])
        if mine != theirs:
            break
    return largest


def _by_token(top: tuple[Logprob, ...]) -> dict[str, float]:
    return {one.token: one.logprob for one in top}
