"""Sequences that run one at a time, in the order they came; they may be drafted.

For models that mlx-lm cannot batch, and for drafting. The same interface as
`mlx_private.Batch`, and the same steps: prefill stops at the end of each segment, the
prompt's last token is evaluated by itself, and a token is handed out with the
log-probabilities that it was drawn from. Without a drafter a step hands out one token,
and it is in the cache then. With one a step may hand out several: see `sequence`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import mlx.core as mx
from mlx_lm.generate import generation_stream

from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.sequence import SoloSequence
from kvport.snapshot.engine.steps import Live, NewSequence, Step, Token
from kvport.snapshot.state.untyped import Cache, Model


@attrs.define(eq=False)
class _Queued:
    uid: int
    sequence: SoloSequence
    parts: deque[Sequence[int]]
    """What is left to prefill."""
    last: int
    """The prompt's last token."""
    end: int
    """Tokens, prompt included, at which the reply ends at the latest."""
    stops: frozenset[int]
    finished: bool = False


class Solo:
    """One model's sequences; all calls from one thread.

    Their uids are negative: never one of a batch's.
    """

    def __init__(
        self,
        model: Model,
        chunk: int,
        make_caches: Callable[[], list[Cache]],
        drafting: Drafting | None = None,
    ) -> None:
        self._model: Final = model
        self._chunk: Final = chunk
        self._make_caches: Final = make_caches
        self._drafting: Final = drafting
        self._queue: deque[_Queued] = deque()
        self._count = 0

    def insert(self, new: NewSequence, *, drafted: bool = True) -> int:
        """Queue a sequence; `drafted` if this one may be.

        Returns:
            The sequence's uid, below 0.

        Raises:
            UnsupportedModelError: it is to be drafted, and the model has a cache of a
                kind that cannot be stepped back.
        """
        self._count -= 1
        prompt = new.prompt
        self._queue.append(
            _Queued(
                uid=self._count,
                sequence=SoloSequence(
                    self._model,
                    self._make_caches() if new.caches is None else new.caches,
                    prefix=new.prefix,
                    sampler=new.sampler,
                    drafting=self._drafting if drafted else None,
                ),
                parts=new.parts(),
                last=prompt[-1],
                end=len(prompt) + new.max_tokens,
                stops=frozenset(new.stops),
            )
        )
        return self._count

    @property
    def idle(self) -> bool:
        """Whether there is no sequence."""
        return not self._queue

    def step(self) -> Step:
        """Decode one token or more, or prefill one chunk, of the first sequence."""
        while self._queue and self._queue[0].finished:
            self._queue.popleft()
        if not self._queue:
            return Step((), ())
        with mx.stream(self.stream):
            first = self._queue[0]
            if first.sequence.drawn:
                return self._decode(first)
            if not first.parts:
                first.sequence.begin(first.last)
                return Step((), ())
            first.sequence.prefill(first.parts, self._chunk)
            return Step((first.uid,), ())

    def live(self, uid: int, held: int | None = None) -> Live | None:
        """The sequence's caches between steps, made to hold exactly what is asked for.

        At a block end and at the end of the reply they do already. Elsewhere in what a
        drafted step handed out this may cost an evaluation: ask where it is needed.

        Args:
            uid: the sequence. One that has finished is there until it is removed, or
                the next step.
            held: tokens, prompt included, that the caches shall hold; None for all that
                were handed out. Less, down to the first token of the last step, ends
                the sequence there.

        Returns:
            None before the sequence's first step.
        """
        first = self._queue[0] if self._queue else None
        if first is None or first.uid != uid or not first.sequence.handed:
            return None
        sequence = first.sequence
        if held is not None and held < sequence.handed:
            first.finished = True
        with mx.stream(self.stream):
            sequence.hold(sequence.handed if held is None else held)
        return Live(sequence.caches, 0, sequence.held)

    def remove(self, uid: int) -> None:
        """Forget a sequence, wherever it is."""
        self._queue = deque(queued for queued in self._queue if queued.uid != uid)

    @property
    def stream(self) -> mx.Stream:
        """The stream that computes; captures join it."""
        stream: mx.Stream = generation_stream
        return stream

    def close(self) -> None:
        """Forget everything."""
        self._queue.clear()

    def _decode(self, queued: _Queued) -> Step:
        sequence, uid = queued.sequence, queued.uid
        guesses = sequence.guess(queued.end, queued.stops)
        *before, (token, logprobs) = sequence.verify(guesses)
        # Guesses stop at what ends the reply: only the last token can be it.
        finish = None
        if sequence.handed >= queued.end:
            finish = "length"
        if token in queued.stops:
            finish = "stop"
        queued.finished = finish is not None
        last = Live(sequence.caches, 0, sequence.held) if queued.finished else None
        tokens = (
            *(Token(uid, earlier, found, None, None) for earlier, found in before),
            Token(uid, token, logprobs, finish, last),
        )
        return Step((), tokens, drafted=len(guesses), accepted=len(before))
