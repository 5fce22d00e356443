"""An engine with one model on a cache: what a selfcheck opens time and again."""

import queue
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import numpy as np

from kvport.manifest.identity import KeyId
from kvport.manifest.layout import StateLayout
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.requests import (
    Cancelled,
    Event,
    Failed,
    Generated,
    Policy,
    Request,
    Started,
)
from kvport.snapshot.engine.running import Tap
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.selfcheck.hot import (
    Canonical,
    Logprobs,
    canonical,
    continue_hot,
)
from kvport.snapshot.engine.steps import Live
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import EngineStoppedError, UnsupportedModelError
from kvport.snapshot.volume import Volume


@attrs.frozen(kw_only=True)
class Place:
    """What the engines of a selfcheck have in common.

    Attributes:
        name: the model's.
        directory: its files.
        work: where the cache is.
        tuning: of the engine that restores.
        block: tokens in a block.
        local: this machine's key, for the time of the selfcheck.
        steps: greedy steps after a prompt's last token.
    """

    name: str
    directory: Path
    work: Path
    tuning: Tuning
    block: int
    local: KeyId
    steps: int


@attrs.define(eq=False)
class Stored:
    """A request that stored its state.

    Attributes:
        prompt: its tokens.
        reply: its reply's tokens.
        seen: by position, what its live caches held there.
    """

    prompt: list[int]
    reply: list[int]
    seen: dict[int, Canonical]


@attrs.define(eq=False)
class _Answer:
    restored: int = 0
    tokens: list[int] = attrs.Factory(list)
    rows: list[Any] = attrs.Factory(list)


class Opened:
    """An engine and the cache below `place.work`; a context."""

    def __init__(self, place: Place, tuning: Tuning) -> None:
        self.place = place
        self._cache = Cache.open(Opening(root=place.work / "cache", free_floor=0))
        self._engine = Engine(tuning)
        try:
            files = FileDigests(place.work / "digests.json")
            self.model = self._engine.load(
                place.name, place.directory, files, self._store
            )
            self.layout = _layout(self.model)
        except BaseException:
            self._close()
            raise

    def _store(self, model: Model) -> Store | None:
        if model.identity is None:
            return None
        namespace = self._cache.namespace(model.identity, "default", self.place.block)
        volume = Volume.holding(self._cache)
        return Store(volume=volume, namespace=namespace, local=self.place.local)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._engine.close()
        self._cache.close()

    def store(
        self, requests: Sequence[Request], wanted: Sequence[frozenset[int]]
    ) -> list[Stored]:
        """Run requests that store their state, each joining while the last decodes.

        Args:
            requests: what to run.
            wanted: for each, positions at which to look at its live caches.
        """
        stored = [Stored(list(request.tokens), [], {}) for request in requests]

        def tap(index: int) -> Tap:
            def look(live: Live) -> None:
                if live.held in wanted[index]:
                    stored[index].seen[live.held] = canonical(self.layout, live)

            return look

        taps = [tap(index) for index in range(len(requests))]
        for found, answer in zip(stored, self._run(requests, taps), strict=True):
            found.reply = answer.tokens
        return stored

    def restore(self, prompt: Sequence[int], policy: Policy) -> tuple[int, Logprobs]:
        """(tokens restored, log-probabilities) of a prompt that stores nothing."""
        return self._continue(prompt, policy, read=True)

    def cold(self, prompt: Sequence[int], policy: Policy) -> Logprobs:
        """The same as on an empty cache."""
        return self._continue(prompt, policy, read=False)[1]

    def hot(self, prompt: Sequence[int], at: int, state: Canonical) -> Logprobs:
        """Go on from what live caches held at position `at`."""
        return self._engine.call(
            lambda: continue_hot(
                self.model,
                self.layout,
                self.place.tuning,
                prompt=prompt,
                at=at,
                state=state,
                steps=self.place.steps,
            )
        )

    def _continue(
        self, prompt: Sequence[int], policy: Policy, *, read: bool
    ) -> tuple[int, Logprobs]:
        request = Request(
            tokens=prompt,
            max_tokens=self.place.steps + 1,
            ignore_eos=True,
            full_logprobs=True,
            policy=policy,
            read=read,
            write=False,
        )
        (answer,) = self._run([request], [None])
        return answer.restored, np.stack(answer.rows)

    def _run(
        self, requests: Sequence[Request], taps: Sequence[Tap | None]
    ) -> list[_Answer]:
        """All requests' answers; each begins with the first token of the one before."""
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()

        def submit(i: int) -> None:
            name, request = self.place.name, requests[i]
            self._engine.submit(name, request, lambda e: events.put((i, e)), taps[i])

        answers = [_Answer() for _ in requests]
        submit(0)
        running = len(requests)
        while running:
            i, event = events.get()
            match event:
                case Started(restored=found):
                    answers[i].restored = found
                case Generated(token=token, full=full, finish=finish):
                    answers[i].tokens.append(token)
                    answers[i].rows.append(full)
                    if len(answers[i].tokens) == 1 and i + 1 < len(requests):
                        submit(i + 1)
                    running -= finish is not None
                case Failed(error=error):
                    raise error
                case Cancelled():
                    raise EngineStoppedError("the selfcheck was stopped")
        return answers


def _layout(model: Model) -> StateLayout:
    if model.layout is None:
        raise UnsupportedModelError(model.refusal or "the model runs uncached")
    return model.layout
