"""Sequences of models that mlx-lm cannot batch: one at a time, in the order they came.

The same interface as `mlx_private.Batch`, and the same steps: prefill stops at the end
of each segment, the prompt's last token is evaluated by itself, and a token is handed
out once it is in the cache, with the log-probabilities that it was drawn from.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import mlx.core as mx
from mlx_lm.generate import generation_stream

from kvport.snapshot.engine.mlx_private import Live, Sampler, Step, Token
from kvport.snapshot.state.untyped import Cache, Model


@attrs.define(eq=False)
class _Sequence:
    uid: int
    segments: deque[Sequence[int]]
    caches: list[Cache]
    tokens: list[int]
    """What the caches hold."""
    max_tokens: int
    sampler: Sampler | None
    stops: frozenset[int]
    generated: int = 0
    drawn: tuple[mx.array, mx.array] | None = None
    """The next token, not in the cache yet, and its log-probabilities."""


class Solo:
    """One model's sequences; all calls from one thread."""

    def __init__(
        self, model: Model, chunk: int, make_caches: Callable[[], list[Cache]]
    ) -> None:
        self._model: Final = model
        self._chunk: Final = chunk
        self._make_caches: Final = make_caches
        self._queue: deque[_Sequence] = deque()
        self._count = 0

    def insert(
        self,
        segments: Sequence[Sequence[int]],
        *,
        prefix: Sequence[int],
        caches: list[Cache] | None,
        max_tokens: int,
        sampler: Sampler | None,
        stops: Sequence[int],
    ) -> int:
        """Queue a sequence: see `Batch.insert`."""
        self._count += 1
        *before, last = segments
        parts = [*before, last[:-1], last[-1:]]
        self._queue.append(
            _Sequence(
                uid=self._count,
                segments=deque(part for part in parts if part),
                caches=self._make_caches() if caches is None else caches,
                tokens=list(prefix),
                max_tokens=max_tokens,
                sampler=sampler,
                stops=frozenset(stops),
            )
        )
        return self._count

    def step(self) -> Step:
        """Decode one token, or prefill one chunk, of the first sequence."""
        if not self._queue:
            return Step((), ())
        with mx.stream(self.stream):
            first = self._queue[0]
            if first.drawn is not None:
                return Step((), (self._decode(first),))
            if len(first.segments) == 1 and len(first.segments[0]) == 1:
                self._draw(first, first.segments.popleft())
                return Step((), ())
            self._prefill(first)
            return Step((first.uid,), ())

    def live(self, uid: int) -> Live | None:
        """The sequence's caches between steps; None before its first step."""
        if self._queue and self._queue[0].uid == uid and self._queue[0].tokens:
            return Live(self._queue[0].caches, 0, len(self._queue[0].tokens))
        return None

    def remove(self, uid: int) -> None:
        """Forget a sequence, wherever it is."""
        self._queue = deque(s for s in self._queue if s.uid != uid)

    @property
    def stream(self) -> mx.Stream:
        """The stream that computes; captures join it."""
        stream: mx.Stream = generation_stream
        return stream

    def close(self) -> None:
        """Forget everything."""
        self._queue.clear()

    def _prefill(self, sequence: _Sequence) -> None:
        segment = sequence.segments[0]
        part, rest = segment[: self._chunk], segment[self._chunk :]
        if rest:
            sequence.segments[0] = rest
        else:
            sequence.segments.popleft()
        self._model(mx.array([part]), cache=sequence.caches)
        mx.eval([cache.state for cache in sequence.caches])
        sequence.tokens += part

    def _decode(self, sequence: _Sequence) -> Token:
        if sequence.drawn is None:
            raise RuntimeError("nothing was drawn yet")
        drawn, logprobs = sequence.drawn
        token: int = drawn.tolist()  # type: ignore[assignment]
        self._draw(sequence, [token])
        sequence.generated += 1
        finish = None
        if sequence.generated >= sequence.max_tokens:
            finish = "length"
        if token in sequence.stops:
            finish = "stop"
        last = None
        if finish is not None:
            last = Live(sequence.caches, 0, len(sequence.tokens))
            self._queue.popleft()
        return Token(sequence.uid, token, logprobs, finish, last)

    def _draw(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        """Evaluate tokens, and draw the one that follows."""
        logits = self._model(mx.array([tokens]), cache=sequence.caches)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sample = sequence.sampler or (lambda found: mx.argmax(found, axis=-1))
        drawn = sample(logprobs)
        mx.eval(drawn, logprobs, [cache.state for cache in sequence.caches])
        sequence.tokens += tokens
        sequence.drawn = (drawn[0], logprobs[0])
