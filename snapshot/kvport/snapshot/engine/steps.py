"""What lanes take in, sequences, and hand out: steps, tokens, where live caches are."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from kvport.snapshot.state.untyped import Cache

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities, shape [1, vocabulary], to a token, shape [1]."""


@attrs.frozen(kw_only=True)
class NewSequence:
    """A sequence to be run.

    Attributes:
        segments: the rest of the prompt, at least a token; prefill stops at the end of
            each, and before the prompt's last token.
        prefix: tokens that `caches` hold.
        caches: restored caches, or None to begin at token 0.
        max_tokens: tokens to generate at most.
        sampler: log-probabilities to tokens; None is greedy.
        stops: token ids that end the reply.
    """

    segments: Sequence[Sequence[int]]
    prefix: Sequence[int] = ()
    caches: list[Cache] | None = None
    max_tokens: int
    sampler: Sampler | None = None
    stops: Sequence[int] = ()

    @property
    def prompt(self) -> list[int]:
        """Its tokens, all of them."""
        return [*self.prefix, *itertools.chain.from_iterable(self.segments)]

    def parts(self) -> deque[Sequence[int]]:
        """What is to be prefilled, cut where prefill stops: all but the last token."""
        *before, last = self.segments
        return deque(part for part in (*before, last[:-1]) if part)


@attrs.frozen
class Live:
    """Where a sequence's live caches are, right now."""

    caches: Sequence[Cache]
    row: int
    held: int
    """Tokens of the sequence that the caches hold."""


@attrs.frozen
class Token:
    """One token of the reply; `live` finds it in the cache when this is handed out."""

    uid: int
    token: int
    logprobs: mx.array
    """Log-probabilities that the token was drawn from, shape [vocabulary]."""
    finish: str | None
    """`stop`, `length`, or None while the sequence goes on."""
    last: Live | None
    """Caches of a finished sequence; they are views of the batch: use at once."""


@attrs.frozen
class Step:
    """What one step did."""

    prefilled: tuple[int, ...]
    """Sequences whose prompt advanced to a stop."""
    tokens: tuple[Token, ...]
    drafted: int = 0
    """Guesses that were verified."""
    accepted: int = 0
    """Guesses among `tokens`."""
