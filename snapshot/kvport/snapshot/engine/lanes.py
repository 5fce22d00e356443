"""What runs a model's sequences: a batch, and beside it one sequence that is drafted.

Models that mlx-lm cannot batch have the second lane only, where sequences queue.
"""

from functools import partial

import mlx.core as mx

from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.mlx_private import Batch
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.engine.steps import Live, NewSequence, Step
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import make_caches


class Lanes:
    """One model's running sequences; all calls from one thread."""

    def __init__(
        self,
        model: Model,
        chunk: int,
        kv_form: KvForm | None,
        drafting: Drafting | None,
    ) -> None:
        """Open what the model needs.

        Args:
            model: what to run.
            chunk: tokens that prefill evaluates at once.
            kv_form: of keys and values, as the model was probed with.
            drafting: how sequences are drafted; None if they are not.
        """
        if model.layout is None:
            kv_form = None  # what the probe refused is served in the model's own form
        module, caches = model.module, partial(make_caches, model.module, kv_form)
        self._batch = Batch(module, chunk, caches) if model.alone is None else None
        self._solo: Solo | None = None
        if self._batch is None or drafting is not None:
            self._solo = Solo(module, chunk, caches, drafting)

    @property
    def drafts(self) -> bool:
        """Whether a sequence that comes now may be drafted.

        The lane takes one at a time: where there is a batch, others need not wait.
        """
        solo = self._solo
        return solo is not None and (self._batch is None or solo.idle)

    def insert(self, new: NewSequence, *, drafted: bool = False) -> int:
        """Queue a sequence: see `Batch.insert` and `Solo.insert`."""
        if self._batch is not None and not drafted:
            return self._batch.insert(new)
        return self._alone.insert(new, drafted=drafted)

    def step(self) -> Step:
        """One step of either lane."""
        steps = [lane.step() for lane in (self._batch, self._solo) if lane is not None]
        return Step(
            prefilled=tuple(uid for step in steps for uid in step.prefilled),
            tokens=tuple(token for step in steps for token in step.tokens),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(step.accepted for step in steps),
        )

    def live(self, uid: int, held: int | None = None) -> Live | None:
        """A sequence's caches, holding `held` tokens: see `Solo.live`."""
        if uid < 0:
            return self._alone.live(uid, held)
        return None if self._batch is None else self._batch.live(uid)

    def remove(self, uid: int) -> None:
        """Forget a sequence, wherever it is."""
        if uid < 0:
            self._alone.remove(uid)
        elif self._batch is not None:
            self._batch.remove(uid)

    @property
    def stream(self) -> mx.Stream:
        """The stream that computes; captures join it."""
        return (self._batch or self._alone).stream

    def close(self) -> None:
        """Forget everything, and give the wired memory limit back."""
        for lane in (self._batch, self._solo):
            if lane is not None:
                lane.close()

    @property
    def _alone(self) -> Solo:
        if self._solo is None:
            raise RuntimeError("nothing was to be drafted")
        return self._solo
