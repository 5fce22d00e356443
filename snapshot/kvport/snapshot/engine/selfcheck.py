"""Selfcheck: does this machine restore this model's state exactly?

Through the real scheduler and a real cache on disk: a prompt is computed and captured,
everything is closed and opened again, the prompt is restored and continued. Compared
are the full vocabulary's log-probabilities over the prompt's last token and the greedy
steps after it, against two references:

* *hot*: the origin's own continuation from the same position, taken straight from its
  live caches in canonical form. No blob, file or lookup is involved.
* *cold*: the same request on an empty cache.
"""

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvport.manifest.identity import KeyId
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.engine.batches import open_batch
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.mlx_private import Batch
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
from kvport.snapshot.engine.runner import Store, Tuning
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.engine.stops import Plan, plan
from kvport.snapshot.errors import (
    EngineStoppedError,
    SettingError,
    UnsupportedModelError,
)
from kvport.snapshot.state.kinds import rebuild
from kvport.snapshot.state.probe import Quantisation
from kvport.snapshot.state.rows import take

STEPS: Final = 32
"""Greedy steps after the prompt's last token."""

Logprobs = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class Report:
    """What a selfcheck found.

    Attributes:
        model: its name.
        policy: the policy under which state was restored.
        tokens: length of the prompt.
        restored_tokens: what the second run restored.
        expected_tokens: what the policy must give.
        max_diff_to_hot: largest absolute difference of log-probabilities to hot.
        max_diff_to_cold: the same to cold.
    """

    model: str
    policy: Policy
    tokens: int
    restored_tokens: int
    expected_tokens: int
    max_diff_to_hot: float
    max_diff_to_cold: float

    @property
    def passed(self) -> bool:
        """Whether the promises of design hold here for this model."""
        exact = self.policy is not Policy.EXACT or self.max_diff_to_cold == 0
        restored = 0 < self.expected_tokens <= self.restored_tokens
        return restored and self.max_diff_to_hot == 0 and exact


def selfcheck(
    name: str,
    directory: Path,
    *,
    work: Path,
    tokens: int,
    policy: Policy,
    chunk: int,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> Report:
    """Check one model.

    Args:
        name: for the report.
        directory: the model's files.
        work: an empty directory for the cache; it is the caller's to remove.
        tokens: length of the random prompt; more than `chunk` under `exact`.
        policy: the policy to restore under.
        chunk: tokens evaluated at once; the stride is the same.
        quantisation: of keys and values, if they are to be quantised.
        seed: of the prompt.

    Raises:
        SettingError: the prompt is too short for the policy to restore anything.
        UnsupportedModelError: the model runs without the cache, and why.
    """
    last = tokens - 1
    expected = last if policy is Policy.NEAREST else last // chunk * chunk
    if expected < 1:
        raise SettingError(f"the policy restores multiples of {chunk} tokens only")
    tuning = Tuning(
        chunk=chunk, stride=chunk, live_bytes=1 << 40, kv_quantisation=quantisation
    )
    local = SigningKey.generate().public.key_id
    files = FileDigests(work / "digests.json")

    first = _Run(name, directory, work=work, tuning=tuning, local=local, files=files)
    try:
        layout = first.layout
        generator = np.random.default_rng(seed)
        prompt = generator.integers(first.model.vocabulary, size=tokens).tolist()
        _, cold = first.complete(prompt, read=False, write=False, policy=policy)
        first.complete(prompt, read=False, write=True, policy=policy)
        way = plan(tokens, layout=layout, chunk=chunk, stride=chunk, fork=None)
        hot = first.hot(prompt, way, expected)
    finally:
        first.close()

    second = _Run(name, directory, work=work, tuning=tuning, local=local, files=files)
    try:
        restored, warm = second.complete(prompt, read=True, write=False, policy=policy)
    finally:
        second.close()
    return Report(
        model=name,
        policy=policy,
        tokens=tokens,
        restored_tokens=restored,
        expected_tokens=expected,
        max_diff_to_hot=_difference(warm, hot),
        max_diff_to_cold=_difference(warm, cold),
    )


class _Run:
    """An engine with one model on the cache below `work`."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        work: Path,
        tuning: Tuning,
        local: KeyId,
        files: FileDigests,
    ) -> None:
        self._name = name
        self._cache = Cache.open(
            work / "cache", cap_bytes=None, on_removed=lambda _: None
        )
        self._engine = Engine(tuning)

        def store(model: Model) -> Store | None:
            if model.identity is None:
                return None
            namespace = self._cache.namespace(model.identity, "default", BLOCK_SIZE)
            return Store(cache=self._cache, namespace=namespace, local=local)

        try:
            self.model = self._engine.load(name, directory, files, store)
            self.layout = _layout(self.model)
        except BaseException:
            self.close()
            raise

    def complete(
        self, prompt: Sequence[int], *, read: bool, write: bool, policy: Policy
    ) -> tuple[int, Logprobs]:
        """Run a request; (restored tokens, log-probabilities [steps, vocabulary])."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = Request(
            tokens=prompt,
            max_tokens=STEPS + 1,
            ignore_eos=True,
            full_logprobs=True,
            policy=policy,
            read=read,
            write=write,
        )
        self._engine.submit(self._name, request, events.put)
        restored, rows = 0, list[Any]()
        while True:
            match events.get():
                case Started(restored=found):
                    restored = found
                case Generated(full=full, finish=finish):
                    rows.append(full)
                    if finish is not None:
                        return restored, np.stack(rows)
                case Failed(error=error):
                    raise error
                case Cancelled():
                    raise EngineStoppedError("the selfcheck was stopped")

    def hot(self, prompt: Sequence[int], way: Plan, at: int) -> Logprobs:
        """The origin's own continuation from canonical state at position `at`."""
        tuning = self._engine.tuning
        batch = self._engine.call(
            lambda: open_batch(self.model, tuning.chunk, tuning.kv_quantisation)
        )
        return self._engine.call(lambda: _hot(batch, self.layout, prompt, way, at))

    def close(self) -> None:
        self._engine.close()
        self._cache.close()


def _layout(model: Model) -> StateLayout:
    if model.layout is None:
        raise UnsupportedModelError(model.refusal or "the model runs uncached")
    return model.layout


def _hot(
    batch: Batch | Solo, layout: StateLayout, prompt: Sequence[int], way: Plan, at: int
) -> Logprobs:
    uid = _insert(batch, prompt, way, 0, None)
    live = None
    while live is None or live.held < at:
        batch.step()
        live = batch.live(uid)
    (segment,), state = take(
        layout, live.caches, row=live.row, held=at, cuts=[(0, at)], state=True
    )
    leaves = {**segment.get(BlobClass.KV, {}), **segment.get(BlobClass.WINDOW, {})}
    leaves |= state or {}
    arrays = [
        [leaves[c, j] for j in range(len(cache.leaves))]
        for c, cache in enumerate(layout.caches)
    ]
    batch.remove(uid)
    _insert(batch, prompt, way, at, rebuild(layout, arrays, at))
    rows: list[Any] = []
    while len(rows) <= STEPS:
        rows += [np.array(t.logprobs.astype(mx.float32)) for t in batch.step().tokens]
    batch.close()
    return np.stack(rows)


def _insert(
    batch: Batch | Solo,
    prompt: Sequence[int],
    way: Plan,
    at: int,
    caches: list[Any] | None,
) -> int:
    return batch.insert(
        way.segments(prompt, at),
        prefix=prompt[:at],
        caches=caches,
        max_tokens=STEPS + 1,
        sampler=None,
        stops=(),
    )


def _difference(left: Logprobs, right: Logprobs) -> float:
    """Largest absolute difference; equal infinities do not differ."""
    same = left == right
    return float(np.max(np.where(same, 0, np.abs(left - right)), initial=0))
