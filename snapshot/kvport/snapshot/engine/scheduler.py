"""The engine: one thread that owns mlx and drives every model's runner.

Requests come in from any thread and answer through their sinks. All mlx work happens
in this one thread, model loading included (lazy arrays belong to the thread that made
them); reading and verifying stored state happens in a worker thread beside it.

Models come and go while others run. One that is loaded is read in pieces, between the
steps of running replies. One that is unloaded is not found from then on; its requests
end, then all of its arrays are freed.
"""

import contextlib
import gc
import math
import queue
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import attrs
import mlx.core as mx
import structlog

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, Numerics
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.departed import Departed
from kvport.snapshot.engine.drafting.source import open_drafting
from kvport.snapshot.engine.futures import settle
from kvport.snapshot.engine.local_identity import FileDigests, numerics
from kvport.snapshot.engine.mlx_private import conformance
from kvport.snapshot.engine.models import Model, load_model
from kvport.snapshot.engine.replies import ReplyText
from kvport.snapshot.engine.requests import Failed, Request, Sink
from kvport.snapshot.engine.runner import Runner
from kvport.snapshot.engine.running import Job, Tap
from kvport.snapshot.engine.served import Left, Served
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.thread_end import join, shut_down
from kvport.snapshot.engine.tuning import Counts, Tuning
from kvport.snapshot.errors import (
    BadPromptError,
    EngineStoppedError,
    ModelUnloadedError,
    OverloadedError,
    PromptTooLargeError,
)

T = TypeVar("T")
log = structlog.get_logger(__name__)


@attrs.frozen
class Ticket:
    """A submitted request."""

    cancel: Callable[[], None]
    """End it; safe from any thread, and after its end."""


@attrs.frozen(eq=False)
class _Leaving:
    runner: Runner
    left: Future[Left]


class Engine:
    """Models and their running requests."""

    def __init__(
        self, tuning: Tuning, on_idle: Callable[[Left], object] = lambda _: None
    ) -> None:
        """Start the thread.

        Args:
            tuning: of models that are loaded without one.
            on_idle: told, in a worker thread, of a model that went by itself.

        Raises:
            EngineConformanceError: mlx-lm is not the one that this was written for.
        """
        self.tuning = tuning
        self._on_idle = on_idle
        self._leaving: list[_Leaving] = []
        self.departed = Departed()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._runners: dict[str, Runner] = {}
        self._counts: dict[str, Counts] = {}
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="kvport-restore")
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kvport-engine")
        self._thread.start()
        try:
            self.call(conformance)
            self.numerics: Numerics = self.call(lambda: numerics(tuning.chunk))
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> Mapping[str, Model]:
        """Loaded models by name."""
        return {name: runner.model for name, runner in list(self._runners.items())}

    @property
    def served(self) -> Mapping[str, Served]:
        """All that is loaded, by name."""
        return {
            name: Served(
                model=runner.model,
                store=runner.store,
                tuning=runner.tuning,
                drafts=runner.drafts,
                keep_alive=runner.keep_alive,
            )
            for name, runner in list(self._runners.items())
        }

    def model(self, name: str) -> Model:
        """A loaded model.

        Raises:
            UnknownModelError: there is none of this name.
        """
        return self._runner(name).model

    def store(self, name: str) -> Store | None:
        """Where the model's state is kept; None if it runs uncached."""
        return self._runner(name).store

    def keep(self, name: str, seconds: float) -> None:
        """Keep a model for so long without a request; infinity is for ever.

        Raises:
            UnknownModelError: there is none of this name.
        """
        self._runner(name).keep_alive = seconds
        self._inbox.put(_nothing)

    @property
    def counts(self) -> Mapping[str, Counts]:
        """What requests of each name asked, restored and computed since the start.

        Also of models that have gone: they never fall.
        """
        found = list(self._counts.items())
        return {name: attrs.evolve(counts) for name, counts in found}

    def load(
        self,
        name: str,
        directory: Path,
        files: FileDigests,
        store: Callable[[Model], Store | None],
        tuning: Tuning | None = None,
        *,
        keep_alive: float = math.inf,
    ) -> Model:
        """Load a model and make it ready for requests; one call at a time.

        Running replies go on meanwhile: the engine's thread only reads weights, by
        pieces, and probes.

        Args:
            name: what requests call it.
            directory: its files.
            files: remembered digests.
            store: gives the place of the model's state once its identity is known.
            tuning: of this model, with the engine's chunk; None for the engine's.
            keep_alive: seconds without a request after which it goes; infinity if not.

        Raises:
            ModelLoadError: mlx-lm cannot load it, or its draft model.
            SettingError: its draft model cannot draft for it.
            EngineStoppedError: the engine has been shut down.
        """
        own = tuning or self.tuning
        model = load_model(name, directory, files, own.kv_form, run=self.call)
        place = store(model)
        block = place.namespace.block_size if place else BLOCK_SIZE
        drafting = open_drafting(
            own.draft, model, files, block_size=block, run=self.call
        )

        def serve() -> None:
            self._runners[name] = Runner(
                model=model,
                store=place,
                counts=self._counts.setdefault(name, Counts()),
                tuning=own,
                numerics=self.numerics,
                workers=self._workers,
                wake=lambda: self._inbox.put(_nothing),
                drafting=drafting,
                keep_alive=keep_alive,
            )

        self.call(serve)
        return model

    def unload(self, name: str, *, force: bool = False) -> Left:
        """Let a model go, and wait until it has gone; others are not concerned.

        It is not found from now on. Its waiting and running requests finish, or end
        with `ModelUnloadedError` if that is forced; in either case what was captured
        of them is stored when this returns.

        Raises:
            UnknownModelError: there is no model of this name.
            EngineStoppedError: the engine was shut down meanwhile.
        """
        left: Future[Left] = Future()
        error = ModelUnloadedError("the model was unloaded") if force else None
        self.call(lambda: self._leave(name, left, error))
        return self._stored(self._result(left))

    def _stored(self, left: Left) -> Left:
        """Wait for what a model left to be stored, and give that memory back, too."""
        if left.store is not None:
            left.store.flush()
            self.call(mx.clear_cache)
        return left

    def submit(
        self, name: str, request: Request, sink: Sink, tap: Tap | None = None
    ) -> Ticket:
        """Queue a request; its events go to `sink`, in the engine's thread.

        Args:
            name: the model.
            request: what to complete.
            sink: takes the events.
            tap: selfcheck's view of the live caches.

        Raises:
            UnknownModelError: there is no model of this name.
            BadPromptError: no tokens, or ids that the model does not know.
            PromptTooLargeError: it could never be admitted.
            OverloadedError: too many requests wait.
            EngineStoppedError: the engine is shutting down.
        """
        runner = self._runner(name)
        model = runner.model
        if not request.tokens or request.max_tokens < 1:
            raise BadPromptError("a prompt and a reply have at least one token each")
        if not 0 <= min(request.tokens) <= max(request.tokens) < model.vocabulary:
            raise BadPromptError("the prompt holds token ids that the model lacks")
        ident = uuid.uuid4().hex
        text = ReplyText(model.tokenizer.detokenizer, request.stop_texts)
        job = Job(ident, request, sink, text, tap)
        if not runner.fits(job):
            raise PromptTooLargeError("the request is above the budget of live state")
        if runner.full:
            raise OverloadedError("too many requests wait for this model")
        if self._stopping:
            raise EngineStoppedError("the server is shutting down")
        self._inbox.put(lambda: runner.add(job))
        # Not bound to the runner: whoever keeps a ticket must not keep a model.
        return Ticket(lambda: self._inbox.put(lambda: self._cancel(ident)))

    def close(self) -> None:
        """End running requests, keep what they captured, and stop the thread."""
        if not self._stopping:
            self._stopping = True
            self._inbox.put(_nothing)
        join(self._thread)
        shut_down(self._workers)

    def _runner(self, name: str) -> Runner:
        if (runner := self._runners.get(name)) is None:
            raise self.departed.refusal(name)
        return runner

    def call(self, work: Callable[[], T]) -> T:
        """Run something in the engine's thread and wait for it.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        future: Future[T] = Future()
        self._inbox.put(lambda: settle(future, work))
        return self._result(future)

    def _result(self, future: Future[T]) -> T:
        while not wait([future], timeout=1).done:
            if not self._thread.is_alive() and not future.done():
                raise EngineStoppedError("the server is shutting down")
        return future.result()

    def store_tails(self, name: str) -> None:
        """Have the ends of a model's replies stored that are in memory only.

        Raises:
            UnknownModelError: there is no model of this name.
            EngineStoppedError: the engine has been shut down.
        """
        self.call(self._runner(name).store_tails)

    def drop_tails(self, name: str) -> None:
        """Have the ends of a model's replies forgotten that are in memory only.

        Raises:
            UnknownModelError: there is no model of this name.
            EngineStoppedError: the engine has been shut down.
        """
        self.call(self._runner(name).drop_tails)

    def purge(self, keys: Collection[KeyId]) -> int:
        """See `Runner.purge`; of all models.

        Raises:
            EngineStoppedError: the engine has been shut down.
        """
        return self.call(lambda: sum(one.purge(keys) for one in self._all()))

    def _wait(self) -> float | None:
        """Seconds until a runner has something to do by itself."""
        waits = [runner.wait for runner in self._runners.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _loop(self) -> None:
        busy = False
        while not self._stopping:
            self._take(block=not busy)
            busy = self._step()
            self._let_go()
        for runner in self._all():
            runner.close()

    # In methods of their own: no local variable of the loop may keep a model.

    def _take(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get(block=block, timeout=self._wait())
                block = False
                _run(work)

    def _step(self) -> bool:
        worked = [runner.step() for runner in self._all()]
        return any(worked)

    def _all(self) -> list[Runner]:
        leaving = (one.runner for one in self._leaving)
        return [*self._runners.values(), *leaving]

    def _cancel(self, ident: str) -> None:
        for runner in self._all():
            runner.cancel(ident)

    def _leave(self, name: str, left: Future[Left], error: KvportError | None) -> None:
        runner = self._runner(name)
        self.departed.add(runner.model, runner.keep_alive, idle=runner.overdue)
        del self._runners[name]
        self._leaving.append(_Leaving(runner, left))
        runner.leave(None if error is None else Failed(error))

    def _let_go(self) -> None:
        """Let idle models leave whose time has come; free those that have left."""
        for name in [n for n, runner in self._runners.items() if runner.overdue]:
            left: Future[Left] = Future()
            left.add_done_callback(self._tell_idle)
            self._leave(name, left, None)
        told = []
        for one in [one for one in self._leaving if not one.runner.busy]:
            self._leaving.remove(one)
            _run(one.runner.close)
            told.append((one.left, one.runner.left))
            del one
        if told:
            # Modules and generators refer to themselves.
            gc.collect()
            mx.clear_cache()
        for future, what in told:
            future.set_result(what)

    def _tell_idle(self, left: Future[Left]) -> None:
        def tell() -> None:
            with contextlib.suppress(EngineStoppedError):
                self._on_idle(self._stored(left.result()))

        self._workers.submit(_run, tell)


def _run(work: Callable[[], object]) -> None:
    """The engine's thread outlives any defect of a single call."""
    try:
        work()
    except Exception:
        log.exception("engine_defect")


def _nothing() -> None:
    """Wakes the loop up."""
