"""What lanes of sequences hand out: steps, tokens, and where live caches are."""

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from kvport.snapshot.state.untyped import Cache

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities, shape [1, vocabulary], to a token, shape [1]."""


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
