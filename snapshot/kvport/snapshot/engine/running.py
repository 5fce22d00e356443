"""One running request: its reply's text, its capture, its events."""

import heapq
from collections.abc import Callable, Collection

import attrs
import mlx.core as mx
import numpy as np
import structlog
from numpy.typing import NDArray

from kvport.manifest.identity import KeyId
from kvport.snapshot.engine.capture import Recorder
from kvport.snapshot.engine.replies import ReplyText
from kvport.snapshot.engine.requests import (
    Cancelled,
    Failed,
    Generated,
    Logprob,
    Request,
    Sink,
)
from kvport.snapshot.engine.steps import Live, Token
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tails import Tail
from kvport.snapshot.engine.taken import Taken

log = structlog.get_logger(__name__)

Tap = Callable[[Live], None]
"""A view of a request's live caches wherever capture looks at them: at each stop of
prefill and at the reply's end, in the engine's thread. They change with the next step.
"""


@attrs.define(eq=False)
class Job:
    """A request on its way through the scheduler."""

    ident: str
    request: Request
    sink: Sink
    reply: ReplyText
    tap: Tap | None = None
    recorder: Recorder | None = None
    origins: frozenset[KeyId] = frozenset()
    """Issuers that any part of what it restored came from."""
    tail: tuple[Taken, ...] = ()
    """Segments that only the end of the reply needs; not stored yet."""
    held: int = attrs.field(init=False)
    """Tokens in the caches once the prompt is: prompt, and reply so far."""
    uid: int | None = None
    started: bool = False
    ending: Cancelled | Failed | None = None
    """How it ends once what is prepared for it can be let go."""
    capture_failed: bool = False

    def __attrs_post_init__(self) -> None:
        self.held = len(self.request.tokens)

    @property
    def final_length(self) -> int:
        """Tokens that its caches hold at the end, at most."""
        return len(self.request.tokens) + self.request.max_tokens

    def is_from(self, keys: Collection[KeyId]) -> bool:
        """Whether any of these keys has a part in what it restored."""
        return not self.origins.isdisjoint(keys)

    def prefilled(self, live: Live) -> None:
        """Prefill came to a stop."""
        self._capture(lambda recorder: recorder.prefilled(live))
        self._show(live)

    def ended(self, live: Live) -> None:
        """The reply ended here, by itself or because it was cancelled."""

        def finish(recorder: Recorder) -> None:
            self.tail = recorder.finished(live)

        self._capture(finish)
        self._show(live)

    def generated(self, token: Token, live: Callable[[], Live]) -> str | None:
        """A token of the reply: capture, then tell. Returns why the reply ended.

        Args:
            token: the token, in the caches by now.
            live: gives the caches that hold everything through this token.
        """
        self.held += 1
        finish = token.finish
        if finish == "stop":  # an end token is no text
            piece = self.reply.end()
        else:
            piece = self.reply.add(token.token)
            if piece.stopped:
                finish = "stop"
            elif finish is not None:
                last = self.reply.end()
                piece = attrs.evolve(last, text=piece.text + last.text)
        held = self.held
        self._capture(lambda recorder: recorder.generated(token.token, held, live))
        if finish is not None:
            self.ended(live())
        self.sink(self._event(token, piece.text, finish))
        return finish

    def left(self, store: Store | None) -> Tail | None:
        """What it leaves in memory, ended; that takes the chain over."""
        if not self.tail or self.recorder is None:
            return None
        if store is None or not store.writable:
            return None
        return Tail(
            namespace=store.namespace,
            chain=self.recorder.chain,
            tokens=self.recorder.tokens,
            prompt=len(self.request.tokens),
            fork=self.request.fork,
            taken=self.tail,
            origins=self.recorder.origins,
        )

    def close(self) -> None:
        """Nothing more will be captured."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _capture(self, step: Callable[[Recorder], None]) -> None:
        """Capture; where that fails, the reply goes on and nothing more is stored."""
        if self.recorder is None:
            return
        try:
            step(self.recorder)
        except Exception:  # mlx raises what it likes
            log.exception("capture_failed")
            self.capture_failed = True
            self.close()

    def _show(self, live: Live) -> None:
        if self.tap is not None:
            self.tap(live)

    def _event(self, token: Token, text: str, finish: str | None) -> Generated:
        wanted = self.request.top_logprobs
        full = None
        logprob, top = None, tuple[Logprob, ...]()
        if wanted is not None or self.request.full_logprobs:
            full = np.array(token.logprobs.astype(mx.float32))
        if wanted is not None and full is not None:
            logprob, top = float(full[token.token]), _top(full, wanted)
        return Generated(
            token=token.token,
            text=text,
            logprob=logprob,
            top=top,
            full=full if self.request.full_logprobs else None,
            finish=finish,
        )


def _top(full: NDArray[np.float32], count: int) -> tuple[Logprob, ...]:
    if not count:
        return ()
    best = heapq.nlargest(count, np.argpartition(full, -count)[-count:], full.item)
    return tuple(Logprob(int(i), float(full[i])) for i in best)
