"""The engine: one thread that owns mlx and drives every model's runner.

Requests come in from any thread and answer through their sinks. All mlx work happens
in this one thread, model loading included (lazy arrays belong to the thread that made
them); reading and verifying stored state happens in a worker thread beside it.
"""

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import attrs
import structlog

from kvport.manifest.identity import Numerics
from kvport.snapshot.engine.drafting.draft_model import DraftModel
from kvport.snapshot.engine.drafting.drafter import (
    DrafterFactory,
    Drafting,
    DraftSource,
)
from kvport.snapshot.engine.drafting.ngram import NgramDrafter
from kvport.snapshot.engine.local_identity import FileDigests, numerics
from kvport.snapshot.engine.mlx_private import conformance
from kvport.snapshot.engine.models import Model, load_model
from kvport.snapshot.engine.replies import ReplyText
from kvport.snapshot.engine.requests import Request, Sink
from kvport.snapshot.engine.runner import Runner, Store
from kvport.snapshot.engine.running import Job, Tap
from kvport.snapshot.engine.tuning import Counts, Tuning
from kvport.snapshot.errors import (
    BadPromptError,
    EngineStoppedError,
    OverloadedError,
    PromptTooLargeError,
    UnknownModelError,
)

T = TypeVar("T")
log = structlog.get_logger(__name__)


@attrs.frozen
class Ticket:
    """A submitted request."""

    ident: str
    cancel: Callable[[], None]
    """End it; safe from any thread, and after its end."""


class Engine:
    """Models and their running requests."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._runners: dict[str, Runner] = {}
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

    def model(self, name: str) -> Model:
        """A loaded model.

        Raises:
            UnknownModelError: there is none of this name.
        """
        return self._runner(name).model

    def store(self, name: str) -> Store | None:
        """Where the model's state is kept; None if it runs uncached."""
        return self._runner(name).store

    def drafts(self, name: str) -> bool:
        """Whether replies of a model may be drafted."""
        return self._runner(name).drafts

    def counts(self, name: str) -> Counts:
        """What the model's requests asked, restored and computed so far."""
        return attrs.evolve(self._runner(name).counts)

    def load(
        self,
        name: str,
        directory: Path,
        files: FileDigests,
        store: Callable[[Model], Store | None],
        tuning: Tuning | None = None,
    ) -> Model:
        """Load a model and make it ready for requests.

        Args:
            name: what requests call it.
            directory: its files.
            files: remembered digests.
            store: gives the place of the model's state once its identity is known.
            tuning: of this model, with the engine's chunk; None for the engine's.

        Raises:
            ModelLoadError: mlx-lm cannot load it, or its draft model.
            SettingError: its draft model cannot draft for it.
        """
        own = tuning or self.tuning

        def work() -> Model:
            model = load_model(name, directory, files, own.kv_form)
            place = store(model)
            self._runners[name] = Runner(
                model=model,
                store=place,
                tuning=own,
                numerics=self.numerics,
                workers=self._workers,
                wake=lambda: self._inbox.put(_nothing),
                drafting=_drafting(own.draft, model, place, files),
            )
            return model

        return self.call(work)

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
        return Ticket(ident, lambda: self._inbox.put(lambda: runner.cancel(ident)))

    def close(self) -> None:
        """End running requests, keep what they captured, and stop the thread."""
        if not self._stopping:
            self._stopping = True
            self._inbox.put(_nothing)
        self._thread.join()
        self._workers.shutdown()

    def _runner(self, name: str) -> Runner:
        try:
            return self._runners[name]
        except KeyError:
            raise UnknownModelError(f"no model is called {name!r} here") from None

    def call(self, work: Callable[[], T]) -> T:
        """Run something in the engine's thread and wait for it.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it goes to the caller
                future.set_exception(error)

        self._inbox.put(run)
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

    def _wait(self) -> float | None:
        """Seconds until a runner has something to do by itself."""
        waits = [runner.wait for runner in self._runners.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _loop(self) -> None:
        busy = False
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                while True:
                    work = self._inbox.get(block=not busy, timeout=self._wait())
                    busy = True
                    _run(work)
            worked = [runner.step() for runner in self._runners.values()]
            busy = any(worked)
        for runner in self._runners.values():
            runner.close()


def _drafting(
    source: DraftSource | None, model: Model, store: Store | None, files: FileDigests
) -> Drafting | None:
    """How a model is drafted, None if it is not."""
    if source is None:
        return None
    if model.layout is None or model.layout.head:
        # State that is not known cannot be stepped back; and in a limited cache what a
        # token sees depends on how many are evaluated at once: replies would differ.
        log.warning("model_undrafted", model=model.name)
        return None
    drafter: DrafterFactory = NgramDrafter
    if source.model is not None:
        drafter = DraftModel(load_model("draft model", source.model, files), model)
    if store is None:
        return Drafting(drafter, draft_tokens=source.tokens)
    return Drafting(drafter, store.namespace.block_size, source.tokens)


def _run(work: Callable[[], None]) -> None:
    """The engine's thread outlives any defect of a single call."""
    try:
        work()
    except Exception:
        log.exception("engine_defect")


def _nothing() -> None:
    """Wakes the loop up."""
