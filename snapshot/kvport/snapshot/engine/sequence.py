"""One sequence that runs alone: what was handed out, and what its caches hold.

A step (a *verify*) evaluates the token that was drawn last, which is certain, and
guesses of what comes after it. At each position the model draws as it would have drawn
anyway; guesses are accepted as long as they are what was drawn. So a step hands out
one token and all accepted ones; without guesses it is plain decoding. The caches are
stepped back from what was rejected:

- A model without whole layers drops the rejected rows.
- A model with whole layers goes back to where it stood before the verify. The tokens
  that were handed out are *ahead* of its caches then, and stand in front of the next
  verify.

Points do not notice: no verify reaches beyond a block end, an end token or the end of
the reply. So the token there is the last of its step, no guess before it was rejected,
and the caches hold exactly the tokens up to it. In between, `hold` makes them do so.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.steps import Sampler
from kvport.snapshot.state.rollback import Snapshot, can_cut, cut
from kvport.snapshot.state.untyped import Cache, Model, token_ids


class SoloSequence:
    """A sequence's tokens and caches.

    Attributes:
        caches: the model's caches.
        held: tokens that the caches hold.
        handed: tokens of the prompt, as far as it was prefilled, and of the reply.
    """

    def __init__(
        self,
        model: Model,
        caches: list[Cache],
        *,
        prefix: Sequence[int],
        sampler: Sampler | None,
        drafting: Drafting | None,
    ) -> None:
        """Begin after `prefix`, which the caches hold.

        Raises:
            UnsupportedModelError: it is to be drafted, and has a cache of a kind that
                cannot be stepped back.
        """
        self.caches: Final = caches
        self.held = self.handed = len(prefix)
        self._model: Final = model
        self._tokens: Final = list(prefix)
        """Those handed out, and at the end the one that was drawn last."""
        self._logprobs: mx.array | None = None
        """What the last token was drawn from; None before the first draw."""
        self._sampler: Final = sampler
        self._drafting: Final = drafting
        self._drafter: Final = drafting.drafter() if drafting else None
        self._cuttable: Final = drafting is not None and can_cut(caches)
        self._before: tuple[int, Snapshot] | None = None
        """Tokens held before the last verify, and the way back there."""
        self._run = 1
        """Tokens that the last step handed out."""

    @property
    def drawn(self) -> bool:
        """Whether the prompt has been read to its end."""
        return self._logprobs is not None

    def prefill(self, parts: deque[Sequence[int]], chunk: int) -> None:
        """Evaluate one chunk of the prompt, at most to the first part's end.

        Args:
            parts: what is left to prefill; the chunk is taken off.
            chunk: tokens that are evaluated at once.
        """
        part = parts.popleft()
        if rest := part[chunk:]:
            parts.appendleft(rest)
        tokens = part[:chunk]
        self._model(mx.array([tokens]), cache=self.caches)
        mx.eval([cache.state for cache in self.caches])
        mx.clear_cache()  # as mlx-lm does: what a chunk needed would stay allocated
        self._tokens.extend(tokens)
        self.held = self.handed = len(self._tokens)

    def begin(self, last: int) -> None:
        """Evaluate the prompt's last token, and draw the reply's first."""
        self._tokens.append(last)
        drawn, rows = self._draw([])
        self.handed += 1
        self._tokens.extend(drawn)
        self._logprobs = rows[0]

    def guess(self, end: int, stops: frozenset[int]) -> list[int]:
        """Guesses to verify with the next step, possibly none.

        Args:
            end: tokens at which the reply ends at the latest.
            stops: tokens that end it.
        """
        if self._drafting is None or self._drafter is None:
            return []
        block, most = self._drafting.block_size, self._drafting.draft_tokens
        room = min(most, block - self.handed % block - 1, end - self.handed - 1)
        # One rejected run may be ahead; then, at the latest, it is evaluated for good:
        # else guesses that are never right would lengthen every verify.
        ahead = self.handed - self.held
        if room < 1 or ahead > most or self._tokens[-1] in stops:
            return []
        guesses = self._drafter.propose(self._tokens, room)[:room]
        ends = (i for i, token in enumerate(guesses, 1) if token in stops)
        return guesses[: next(ends, room)]

    def verify(self, guesses: Sequence[int]) -> list[tuple[int, mx.array]]:
        """Hand out the token drawn last, and the guesses that are drawn after it.

        Returns:
            Tokens with the log-probabilities that they were drawn from; the caches hold
            the last of them, unless a guess was rejected.

        Raises:
            RuntimeError: the prompt has not been read to its end.
        """
        if self._logprobs is None:
            raise RuntimeError("nothing was drawn yet")
        self._before = None
        if guesses and not self._cuttable:
            self._before = (self.held, Snapshot(self.caches))
        drawn, rows = self._draw(guesses)
        accepted = len(drawn) - 1
        tokens = [self._tokens[-1], *drawn[:-1]]
        logprobs = [self._logprobs, *rows[:accepted]]
        self._tokens.extend(drawn)
        self._logprobs = rows[accepted]
        self.handed += len(tokens)
        self._run = len(tokens)
        if accepted < len(guesses):
            self._step_back(self.handed)
        return list(zip(tokens, logprobs, strict=True))

    def hold(self, count: int) -> None:
        """Make the caches hold exactly `count` tokens.

        Args:
            count: `handed`, or less if the reply ends within what the last step handed
                out. Then it has ended: no step may follow.

        Raises:
            RuntimeError: `count` is out of this range.
        """
        if not self.handed - self._run < count <= self.handed:
            raise RuntimeError("the caches cannot go back so far")
        if count < self.held:
            self._step_back(count)
        if self.held < count:
            self._model(mx.array([self._tokens[self.held : count]]), cache=self.caches)
            mx.eval([cache.state for cache in self.caches])
            self.held = count
        if count < self.handed:
            self.handed, self._run, self._logprobs = count, 1, None

    def _step_back(self, count: int) -> None:
        """Bring the caches to `count` tokens, or to where the last verify began."""
        if self._before is None:
            cut(self.caches, self.held - count)
            self.held = count
        else:
            self.held, snapshot = self._before
            snapshot.restore()
            self._before = None

    def _draw(self, guesses: Sequence[int]) -> tuple[list[int], mx.array]:
        """Evaluate what is ahead and guesses; draw until a guess is not what is drawn.

        Returns:
            The tokens drawn, one or more; log-probabilities, shape [guesses + 1,
            vocabulary].
        """
        tokens = [*self._tokens[self.held :], *guesses]
        logits = self._model(mx.array([tokens]), cache=self.caches)
        logits = logits[0, -len(guesses) - 1 :]
        rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampler = self._sampler
        first = mx.argmax(rows, axis=-1) if sampler is None else sampler(rows[:1])
        mx.eval(first, rows, [cache.state for cache in self.caches])
        self.held += len(tokens)
        found, accepted = token_ids(first), 0
        for guess in guesses:
            if guess != found[accepted]:
                break
            accepted += 1
            # A sampler draws once per token, in order: a seed gives the same reply.
            if sampler is not None:
                found += token_ids(sampler(rows[accepted : accepted + 1]))
        return found[: accepted + 1], rows
