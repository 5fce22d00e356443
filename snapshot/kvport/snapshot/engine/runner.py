"""One model's requests: waiting, being restored, prefilled, decoded.

A request waits in order until the budget of live state admits it; then its state is
looked up and read by a worker thread; then it is prefilled, one at a time, and decoded
together with all others. An `exact` request runs alone from its admission to its end.

A runner that leaves takes no more requests; it can be closed once it is not busy.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future

import mlx.core as mx
import structlog

from kvport.manifest.identity import KeyId, Numerics
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.engine.budget import Budget, default_budget
from kvport.snapshot.engine.capture import Recorder
from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.lanes import Lanes
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.requests import (
    Cancelled,
    Failed,
    Policy,
    Request,
    Started,
)
from kvport.snapshot.engine.restore import NOTHING, Prepared
from kvport.snapshot.engine.running import Job
from kvport.snapshot.engine.sampling import make_sampler
from kvport.snapshot.engine.served import Left
from kvport.snapshot.engine.steps import Live, NewSequence, Token
from kvport.snapshot.engine.stops import plan
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tails import Tail, Tails
from kvport.snapshot.engine.tuning import Counts, Tuning
from kvport.snapshot.errors import (
    EngineFailureError,
    ModelUnloadedError,
    RevokedStateError,
)

log = structlog.get_logger(__name__)


class Runner:
    """All of one model's requests; every call in the engine's thread."""

    def __init__(
        self,
        *,
        model: Model,
        store: Store | None,
        counts: Counts,
        tuning: Tuning,
        numerics: Numerics,
        workers: Executor,
        wake: Callable[[], None],
        drafting: Drafting | None,
        keep_alive: float,
    ) -> None:
        self.model = model
        self.tuning = tuning
        self.keep_alive = keep_alive
        """Seconds without a request after which the model shall go, infinity if not."""
        self.store = store
        self.counts = counts
        self._numerics = numerics
        self._workers = workers
        self._wake = wake
        self._drafting = drafting
        self._leaving = False
        self._revoked = frozenset[KeyId]()
        self._idle_since = time.monotonic()
        self._waiting: deque[Job] = deque()
        self._preparing: tuple[Job, Future[Prepared]] | None = None
        self._active: dict[int, Job] = {}
        self._prefilling: int | None = None
        self._lanes = self._new_lanes()
        self._tails = Tails(tuning.reply_idle)
        self._budget = Budget.of(
            model.layout, tuning.chunk, tuning.live_bytes or default_budget(self.nbytes)
        )

    def _new_lanes(self) -> Lanes:
        chunk, kv_form = self.tuning.chunk, self.tuning.kv_form
        return Lanes(self.model, chunk, kv_form, self._drafting)

    def fits(self, job: Job) -> bool:
        """Whether the request could ever be admitted."""
        return self._budget.allows([job.final_length])

    @property
    def full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._waiting) >= self.tuning.queue

    @property
    def drafts(self) -> bool:
        """Whether replies may be drafted."""
        return self._drafting is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, those of a draft model included."""
        return self.model.nbytes + (self._drafting.nbytes if self._drafting else 0)

    @property
    def left(self) -> Left:
        """What remains to be said once it has been closed."""
        return Left(name=self.model.name, nbytes=self.nbytes, store=self.store)

    @property
    def busy(self) -> bool:
        """Whether there is a request, waiting or running."""
        return bool(self._waiting or self._active or self._preparing)

    @property
    def overdue(self) -> bool:
        """Whether there was no request for as long as the model is kept."""
        left = self._kept_for
        return left is not None and left <= 0

    @property
    def _kept_for(self) -> float | None:
        """Seconds for which the model is kept; None if no end is known."""
        if self.keep_alive == math.inf or self.busy or self._leaving:
            return None
        return self._idle_since + self.keep_alive - time.monotonic()

    def add(self, job: Job) -> None:
        """Queue a request."""
        if self._leaving:
            job.sink(Failed(ModelUnloadedError("the model has just been unloaded")))
            return
        self._waiting.append(job)

    def cancel(self, ident: str) -> None:
        """End a request, wherever it is; what was captured stays."""
        self._end(lambda job: job.ident == ident, Cancelled())

    def leave(self, ending: Failed | None) -> None:
        """Take no more requests; let those that there are finish, or end them so."""
        self._leaving = True
        if ending is not None:
            self._end(lambda _: True, ending)

    def _end(self, which: Callable[[Job], bool], ending: Cancelled | Failed) -> None:
        for job in [job for job in self._waiting if which(job)]:
            self._waiting.remove(job)
            job.sink(ending)
        if self._preparing is not None and which(self._preparing[0]):
            self._preparing[0].ending = self._preparing[0].ending or ending
        for uid, job in list(self._active.items()):
            if which(job):
                live = self._lanes.live(uid)
                if job.started and live is not None:
                    with mx.stream(self._lanes.stream):
                        job.ended(live)
                self._remove(uid)
                job.sink(ending)

    def step(self) -> bool:
        """Do what can be done now; False if there is nothing to do but wait."""
        if self.busy:
            self._idle_since = time.monotonic()
        try:
            self._tails.store_due(self._is_continued)
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
        self._end(lambda _: True, Cancelled())
        if self._preparing is not None:
            self._preparing[1].exception()  # wait: it may hold a lease
            self._insert_prepared()
        self.store_tails()
        self._lanes.close()

    def store_tails(self) -> None:
        """Append all that is kept in memory to the cache's queue."""
        self._tails.store_all()

    def drop_tails(self) -> None:
        """Forget the ends of replies that are in memory only."""
        self._tails.drop_all()

    def purge(self, keys: Collection[KeyId]) -> int:
        """End requests that restored state from these keys; answers how many ran.

        Those for which some was found, but that do not run yet, end when they would.
        To be called once the cache was purged, so that none finds any afterwards.
        """
        self._revoked |= frozenset(keys)
        self._tails.drop_from(keys)
        ended = {u: job for u, job in self._active.items() if job.is_from(keys)}
        for uid, job in ended.items():
            job.close()
            self._remove(uid)
            job.sink(_revoked())
        if ended:
            mx.clear_cache()
        return len(ended)

    @property
    def wait(self) -> float | None:
        """Seconds until something is to be done without a new request, or None."""
        waits = (self._tails.wait, self._kept_for)
        return min((max(0, one) for one in waits if one is not None), default=None)

    def _prepare_next(self) -> None:
        if self._preparing is not None or self._prefilling is not None:
            return
        if not self._waiting or not self._admits(self._waiting[0]):
            return
        job = self._waiting.popleft()
        tail = self._tail_for(job.request)
        future = self._workers.submit(self._prepare, job, tail)
        future.add_done_callback(lambda _: self._wake())
        self._preparing = (job, future)

    def _admits(self, job: Job) -> bool:
        running = list(self._active.values())
        if any(j.request.policy is Policy.EXACT for j in (*running, job)):
            return not running
        if not running:
            return True
        if self.model.alone is not None or len(running) >= self.tuning.batch:
            return False
        return self._budget.allows([j.final_length for j in (*running, job)])

    def _tail_for(self, request: Request) -> Tail | None:
        if request.policy is Policy.EXACT or request.within is not None:
            return None
        tokens = encode_tokens(request.tokens)
        return self._tails.longest(tokens, len(request.tokens) - 1)

    def _is_continued(self, tail: Tail) -> bool:
        """Whether a prompt that is being computed will supersede a tail."""
        coming = [job for job in self._active.values() if not job.started]
        if self._preparing is not None:
            coming.append(self._preparing[0])
        return any(
            job.request.write and tail.superseded_by(encode_tokens(job.request.tokens))
            for job in coming
        )

    def _prepare(self, job: Job, tail: Tail | None) -> Prepared:
        if self.store is None:
            return NOTHING
        return self.store.prepare(
            job.request,
            job.ident,
            numerics=self._numerics,
            retention=self.tuning.retention,
            tail=tail,
        )

    def _insert_prepared(self) -> None:
        if self._preparing is None or not self._preparing[1].done():
            return
        (job, future), self._preparing = self._preparing, None
        chain = None
        try:
            prepared = future.result()
            chain, job.origins = prepared.chain, prepared.base.origins
            if job.is_from(self._revoked):
                job.ending = job.ending or _revoked()
            if job.ending is None:
                self._insert(job, prepared)
                return
        except Exception as error:  # mlx and files raise what they like
            log.exception("insert_failure", model=self.model.name)
            job.sink(Failed.of(error))
        else:
            job.sink(job.ending)
        if chain is not None:
            chain.close()

    def _insert(self, job: Job, prepared: Prepared) -> None:
        request, tuning = job.request, self.tuning
        restored = prepared.restored
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
                    base=prepared.base,
                    restored=restored,
                    local=self.store.local,
                    numerics=self._numerics,
                    stride=tuning.stride,
                    fork=request.fork,
                    waiting=prepared.waiting,
                )
        new = NewSequence(
            segments=segments,
            prefix=request.tokens[:restored],
            caches=prepared.assembly.caches() if prepared.assembly else None,
            max_tokens=request.max_tokens,
            sampler=make_sampler(request.sampling),
            stops=() if request.ignore_eos else self.model.end_tokens,
        )
        job.uid = self._lanes.insert(new, drafted=self._drafts(request))
        self._active[job.uid] = job
        self._prefilling = job.uid
        self.counts.add_prompt(len(request.tokens), restored, read=request.read)
        if self.store is not None and restored:
            self.store.note_restored(restored)
        job.sink(Started(restored))

    def _drafts(self, request: Request) -> bool:
        wanted = request.draft and request.policy is not Policy.EXACT
        return wanted and self._drafting is not None and self._lanes.drafts

    def _advance(self) -> None:
        with mx.stream(self._lanes.stream):
            step = self._lanes.step()
            self.counts.drafted_tokens += step.drafted
            self.counts.accepted_tokens += step.accepted
            for uid in step.prefilled:
                live = self._lanes.live(uid)
                if live is not None:
                    self._active[uid].prefilled(live)
            for token in step.tokens:
                # A reply may end within what a drafted step handed out.
                if (job := self._active.get(token.uid)) is not None:
                    self._generated(job, token)

    def _generated(self, job: Job, token: Token) -> None:
        if self._prefilling == token.uid:
            self._prefilling = None
        if not job.started:
            job.started = True
            if job.recorder is not None:
                # The prompt is stored, with a point at its end.
                superseded = self._tails.supersede(job.recorder.tokens)
                self.counts.superseded_replies += superseded
        self.counts.generated_tokens += 1

        def live() -> Live:
            found = token.last or self._lanes.live(token.uid, job.held)
            if found is None:
                raise EngineFailureError("a running sequence has no caches")
            return found

        if job.generated(token, live) is not None:
            self._remove(token.uid)

    def _remove(self, uid: int) -> None:
        job = self._active.pop(uid)
        if self._prefilling == uid:
            self._prefilling = None
        self._lanes.remove(uid)
        self.counts.failed_captures += job.capture_failed
        if job.recorder is not None:
            self.counts.stripped_points += job.recorder.stripped_points
        if (tail := job.left(self.store)) is None:
            job.close()
        elif job.request.pin is not None:
            tail.store(tail.namespace.layout)  # the whole path is to be pinned
        else:
            self._tails.add(tail)

    def _fail_all(self, error: Exception) -> None:
        failure = Failed.of(error)
        jobs, self._active, self._prefilling = list(self._active.values()), {}, None
        self._lanes.close()
        self._lanes = self._new_lanes()
        for job in jobs:
            job.close()
            job.sink(failure)


def _revoked() -> Failed:
    return Failed(RevokedStateError("state that the request had restored was revoked"))
