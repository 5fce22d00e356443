"""One model's requests: waiting, being restored, prefilled, decoded.

A request waits in order until the budget of live state admits it; then its state is
looked up and read by a worker thread; then it is prefilled, one at a time, and decoded
together with all others. An `exact` request runs alone from its admission to its end.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

import attrs
import mlx.core as mx
import structlog

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, Numerics
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.engine.batches import open_batch
from kvport.snapshot.engine.budget import Footprint, default_budget, footprint
from kvport.snapshot.engine.capture import Recorder, base_of
from kvport.snapshot.engine.mlx_private import Batch, Token
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.requests import Cancelled, Failed, Policy, Started
from kvport.snapshot.engine.restore import Prepared, prepare
from kvport.snapshot.engine.running import Job
from kvport.snapshot.engine.sampling import make_sampler
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.engine.stops import plan
from kvport.snapshot.errors import EngineFailureError
from kvport.snapshot.state.probe import Quantisation

log = structlog.get_logger(__name__)


@attrs.define
class Counts:
    """What a model's requests asked, restored and computed, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    hits: int = 0
    misses: int = 0
    failed_captures: int = 0


@attrs.frozen(kw_only=True)
class Store:
    """Where a model's state is kept; a model that runs uncached has none."""

    cache: Cache
    namespace: Namespace
    local: KeyId


@attrs.frozen(kw_only=True)
class Tuning:
    """Settings of the scheduler.

    Attributes:
        chunk: tokens that prefill evaluates at once; a multiple of the block size.
        stride: tokens between `stride` points; a multiple of the chunk.
        live_bytes: budget of live state per model; None for what memory allows.
        queue: requests that may wait per model.
        batch: requests that may be decoded together.
        kv_quantisation: of keys and values, from token 0 on; None for the model's own
            representation.
    """

    chunk: int = 512
    stride: int = 4096
    live_bytes: int | None = None
    queue: int = 64
    batch: int = 32
    kv_quantisation: Quantisation | None = None


class Runner:
    """All of one model's requests; every call in the engine's thread."""

    def __init__(
        self,
        *,
        model: Model,
        store: Store | None,
        tuning: Tuning,
        numerics: Numerics,
        workers: Executor,
        wake: Callable[[], None],
    ) -> None:
        self.model = model
        self.store = store
        self.counts = Counts()
        self._tuning = tuning
        self._numerics = numerics
        self._workers = workers
        self._wake = wake
        self._waiting: deque[Job] = deque()
        self._preparing: tuple[Job, Future[Prepared]] | None = None
        self._active: dict[int, Job] = {}
        self._prefilling: int | None = None
        self._batch = self._new_batch()
        self._budget: int = tuning.live_bytes or default_budget(model.nbytes)
        self._footprint: Footprint | None = (
            footprint(model.layout, tuning.chunk) if model.layout else None
        )

    def _new_batch(self) -> Batch | Solo:
        tuning = self._tuning
        return open_batch(self.model, tuning.chunk, tuning.kv_quantisation)

    def fits(self, job: Job) -> bool:
        """Whether the request could ever be admitted."""
        return (
            self._footprint is None
            or self._footprint.batch([job.final_length]) <= self._budget
        )

    @property
    def full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._waiting) >= self._tuning.queue

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def cancel(self, ident: str) -> None:
        """End a request, wherever it is; what was captured stays."""
        for job in [j for j in self._waiting if j.ident == ident]:
            self._waiting.remove(job)
            job.sink(Cancelled())
        if self._preparing is not None and self._preparing[0].ident == ident:
            self._preparing[0].cancelled = True
        for uid, job in list(self._active.items()):
            if job.ident == ident:
                live = self._batch.live(uid)
                if job.started and live is not None:
                    with mx.stream(self._batch.stream):
                        job.ended(live)
                self._remove(uid)
                job.sink(Cancelled())

    def step(self) -> bool:
        """Do what can be done now; False if there is nothing to do but wait."""
        try:
            self._insert_prepared()
            self._prepare_next()
            if not self._active:
                return False
            self._advance()
        except Exception as error:  # mlx raises plain errors
            log.exception("engine_failure", model=self.model.name)
            self._fail_all(error)
        return True

    def close(self) -> None:
        """End everything; running replies keep what was captured."""
        jobs = [*self._waiting, *self._active.values()]
        if self._preparing is not None:
            jobs.append(self._preparing[0])
            self._preparing[0].cancelled = True
            self._preparing[1].exception()  # wait: it may hold a lease
            self._insert_prepared()
        for job in jobs:
            self.cancel(job.ident)
        self._batch.close()

    def _prepare_next(self) -> None:
        if self._preparing is not None or self._prefilling is not None:
            return
        if not self._waiting or not self._admits(self._waiting[0]):
            return
        job = self._waiting.popleft()
        future = self._workers.submit(self._prepare, job)
        future.add_done_callback(lambda _: self._wake())
        self._preparing = (job, future)

    def _admits(self, job: Job) -> bool:
        running = list(self._active.values())
        if any(j.request.policy is Policy.EXACT for j in (*running, job)):
            return not running
        if not running:
            return True
        if self.model.alone is not None or len(running) >= self._tuning.batch:
            return False
        lengths = [j.final_length for j in (*running, job)]
        return self._footprint is None or self._footprint.batch(lengths) <= self._budget

    def _prepare(self, job: Job) -> Prepared:
        if self.store is None:
            return Prepared(None, None, None)
        return prepare(
            self.store.cache,
            self.store.namespace,
            job.request,
            owner=job.ident,
            local=self.store.local,
            numerics=self._numerics,
        )

    def _insert_prepared(self) -> None:
        if self._preparing is None or not self._preparing[1].done():
            return
        (job, future), self._preparing = self._preparing, None
        chain = None
        try:
            prepared = future.result()
            chain = prepared.chain
            if not job.cancelled:
                self._insert(job, prepared)
                return
        except Exception as error:  # mlx and files raise what they like
            log.exception("insert_failure", model=self.model.name)
            job.sink(Failed(_failure(error)))
        else:
            job.sink(Cancelled())
        if chain is not None:
            chain.close()

    def _insert(self, job: Job, prepared: Prepared) -> None:
        request, tuning = job.request, self._tuning
        restored = prepared.match.position if prepared.match else 0
        segments = [request.tokens[restored:]]
        if self.model.layout is not None:
            way = plan(
                len(request.tokens),
                layout=self.model.layout,
                chunk=tuning.chunk,
                stride=tuning.stride,
                fork=request.fork,
            )
            segments = way.segments(request.tokens, restored)
            if prepared.chain is not None and self.store is not None:
                job.recorder = Recorder(
                    namespace=self.store.namespace,
                    chain=prepared.chain,
                    prompt=request.tokens,
                    plan=way,
                    base=base_of(
                        prepared.match, local=self.store.local, numerics=self._numerics
                    ),
                    restored=restored,
                    local=self.store.local,
                    numerics=self._numerics,
                    stride=tuning.stride,
                )
        job.uid = self._batch.insert(
            segments,
            prefix=request.tokens[:restored],
            caches=prepared.assembly.caches() if prepared.assembly else None,
            max_tokens=request.max_tokens,
            sampler=make_sampler(request.sampling),
            stops=() if request.ignore_eos else self.model.end_tokens,
        )
        self._active[job.uid] = job
        self._prefilling = job.uid
        self._count(job, restored)
        job.sink(Started(restored))

    def _count(self, job: Job, restored: int) -> None:
        length = len(job.request.tokens)
        self.counts.requests += 1
        self.counts.prompt_tokens += length
        self.counts.restored_tokens += restored
        self.counts.computed_tokens += length - restored
        if job.request.read:
            self.counts.hits += restored > 0
            self.counts.misses += restored == 0

    def _advance(self) -> None:
        with mx.stream(self._batch.stream):
            step = self._batch.step()
            for uid in step.prefilled:
                live = self._batch.live(uid)
                if live is not None:
                    self._active[uid].prefilled(live)
            for token in step.tokens:
                self._generated(token)

    def _generated(self, token: Token) -> None:
        job = self._active[token.uid]
        if self._prefilling == token.uid:
            self._prefilling = None
        job.started = True
        self.counts.generated_tokens += 1
        live = token.last or self._batch.live(token.uid)
        if live is None:
            raise EngineFailureError("a running sequence has no caches")
        if job.generated(token, live) is not None:
            self._remove(token.uid)

    def _remove(self, uid: int) -> None:
        job = self._active.pop(uid)
        if self._prefilling == uid:
            self._prefilling = None
        self._batch.remove(uid)
        self.counts.failed_captures += job.capture_failed
        job.close()

    def _fail_all(self, error: Exception) -> None:
        failure = _failure(error)
        jobs, self._active, self._prefilling = list(self._active.values()), {}, None
        self._batch.close()
        self._batch = self._new_batch()
        for job in jobs:
            job.close()
            job.sink(Failed(failure))


def _failure(error: Exception) -> KvportError:
    """What a client is told: our own errors as they are, of others only the fact."""
    if isinstance(error, KvportError):
        return error
    return EngineFailureError("the model's computation failed")
