"""The only module that knows mlx-lm's private attributes, behind a small interface.

`Batch` prefills one sequence at a time, on caches of its own (no padding, so bytes do
not depend on neighbours; and attention to a long prompt needs no mask in memory), and
decodes all of them in one `BatchGenerator`. After each `step` it says where the live
caches of a sequence are and how many tokens they hold: all that capture needs.

`conformance` proves on a one-layer model that these attributes mean what is assumed of
them here. It runs at every start: mlx-lm is pinned, but pins can be overridden.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from kvport.manifest.layout import BlobClass
from kvport.snapshot.engine.sequence import SoloSequence
from kvport.snapshot.engine.steps import Live, NewSequence, Step, Token
from kvport.snapshot.errors import EngineConformanceError
from kvport.snapshot.state.probe import probe
from kvport.snapshot.state.rows import take
from kvport.snapshot.state.untyped import Cache, Model

_UNBOUNDED: Final = 1 << 20
"""Width of the generation batch; admission is the scheduler's business, and a full
batch would block prefill."""


@attrs.define(eq=False)
class _Prefill:
    """A prompt on its way into the batch."""

    sequence: SoloSequence
    parts: deque[Sequence[int]]
    """What is left of it, without its last token."""
    enter: Callable[[list[Cache]], int]
    """Hand its caches to the generator; gives the uid there."""


class Batch:
    """One model's running sequences; all calls from one thread."""

    def __init__(
        self, model: Model, chunk: int, make_caches: Callable[[], list[Cache]]
    ) -> None:
        self._model: Final = model
        self._chunk: Final = chunk
        self._make_caches: Final = make_caches
        self._generator: Final = BatchGenerator(
            model, prefill_batch_size=1, completion_batch_size=_UNBOUNDED
        )
        self._prefills: dict[int, _Prefill] = {}
        self._inner: dict[int, int] = {}
        """The generator's uid of each sequence that is in it."""
        self._count = 0

    def insert(self, new: NewSequence) -> int:
        """Queue a sequence.

        Returns:
            The sequence's uid, above 0.
        """
        prompt, max_tokens, sampler = new.prompt, new.max_tokens, new.sampler
        stops = [StopSequences([[stop] for stop in new.stops])]

        def enter(filled: list[Cache]) -> int:
            (uid,) = self._generator.insert_segments(
                [[prompt[-1:]]],
                max_tokens=[max_tokens],
                caches=[filled if len(prompt) > 1 else None],
                all_tokens=[prompt[:-1]],
                samplers=[sampler],
                stop_sequences=stops,
            )
            return int(uid)

        self._count += 1
        self._prefills[self._count] = _Prefill(
            sequence=SoloSequence(
                self._model,
                self._make_caches() if new.caches is None else new.caches,
                prefix=new.prefix,
                sampler=None,
                drafting=None,
            ),
            parts=new.parts(),
            enter=enter,
        )
        return self._count

    def step(self) -> Step:
        """Decode one token for all, then prefill one chunk of one sequence."""
        self._enter()
        replies = self._generator.next()[1] if self._inner else ()
        outer = {inner: uid for uid, inner in self._inner.items()}
        return Step(
            prefilled=self._prefill(),
            tokens=tuple(
                Token(
                    uid=outer[r.uid],
                    token=r.token,
                    logprobs=r.logprobs,
                    finish=r.finish_reason,
                    last=None
                    if r.prompt_cache is None
                    else Live(r.prompt_cache, 0, len(r.all_tokens)),
                )
                for r in replies
            ),
        )

    def live(self, uid: int) -> Live | None:
        """The sequence's caches between steps; None before its first step."""
        if (prefill := self._prefills.get(uid)) is not None:
            found = prefill.sequence
            return Live(found.caches, 0, found.held) if found.held else None
        inner = self._inner.get(uid)
        for batch in (self._generator._prompt_batch, self._generator._generation_batch):  # noqa: SLF001 - what this module is for
            if inner in batch.uids:
                row = batch.uids.index(inner)
                return Live(batch.prompt_cache, row, len(batch.tokens[row]))
        return None

    def remove(self, uid: int) -> None:
        """Forget a sequence, wherever it is."""
        self._prefills.pop(uid, None)
        if (inner := self._inner.pop(uid, None)) is not None:
            self._generator.remove([inner])

    @property
    def stream(self) -> mx.Stream:
        """The stream that computes; captures join it."""
        stream: mx.Stream = self._generator.stream
        return stream

    def close(self) -> None:
        """Give the wired memory limit back."""
        self._generator.close()

    def _enter(self) -> None:
        """Hand over what is prefilled; nothing here holds its caches any longer."""
        for uid in [uid for uid, p in self._prefills.items() if not p.parts]:
            prefill = self._prefills.pop(uid)
            self._inner[uid] = prefill.enter(prefill.sequence.caches)

    def _prefill(self) -> tuple[int, ...]:
        """Prefill one chunk; the sequence that advanced."""
        if not self._prefills:
            return ()
        uid, prefill = next(iter(self._prefills.items()))
        with mx.stream(self.stream):
            prefill.sequence.prefill(prefill.parts, self._chunk)
        return (uid,)


def conformance() -> None:
    """Check what this module assumes of mlx-lm, on a one-layer model.

    Raises:
        EngineConformanceError: naming what is otherwise.
    """
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=8, num_hidden_layers=1,
            intermediate_size=8, num_attention_heads=1, rms_norm_eps=1e-5,
            vocab_size=16,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    layout, prompt = probe(model).layout, [3, 1, 4, 1, 5, 9, 2]
    alone = make_prompt_cache(model)
    model(mx.array([prompt[:4]]), cache=alone)
    expected = take(layout, alone, row=0, held=4, cuts=[(1, 4)], state=False)

    batch = Batch(model, 4, lambda: list(make_prompt_cache(model)))
    uids = []
    for _ in range(2):
        segments = [prompt[:4], prompt[4:6], prompt[6:]]
        uids.append(batch.insert(NewSequence(segments=segments, max_tokens=3)))
    if batch.step().prefilled != (uids[0],) or _held(batch, uids[0]) != 4:
        raise EngineConformanceError("prefill does not stop at the end of a segment")
    counts = dict.fromkeys(uids, len(prompt))
    for _ in range(12):
        for token in batch.step().tokens:
            live = token.last or batch.live(token.uid)
            counts[token.uid] += 1
            if live is None or live.held != counts[token.uid]:
                raise EngineConformanceError("a handed-out token is not in the cache")
            found = take(
                layout,
                live.caches,
                row=live.row,
                held=live.held,
                cuts=[(1, 4)],
                state=False,
            )
            for a, b in zip(expected[0], found[0], strict=True):
                for index, leaf in a[BlobClass.KV].items():
                    if not mx.array_equal(leaf, b[BlobClass.KV][index]).item():
                        raise EngineConformanceError("rows are not where they belong")
    if set(counts.values()) != {len(prompt) + 3}:
        raise EngineConformanceError("a reply does not end where it was told to")
    batch.close()


def _held(batch: Batch, uid: int) -> int | None:
    live = batch.live(uid)
    return None if live is None else live.held
