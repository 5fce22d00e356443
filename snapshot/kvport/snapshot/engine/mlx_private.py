"""The only module that knows mlx-lm's private attributes, behind a small interface.

`Batch` drives one `BatchGenerator`: prefill one sequence at a time (no padding, so
bytes do not depend on neighbours), decode batched. After each `step` it says where the
live caches of a sequence are and how many tokens they hold: all that capture needs.

`conformance` proves on a one-layer model that these attributes mean what is assumed of
them here. It runs at every start: mlx-lm is pinned, but pins can be overridden.
"""

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from kvport.manifest.layout import BlobClass
from kvport.snapshot.errors import EngineConformanceError
from kvport.snapshot.state.probe import probe
from kvport.snapshot.state.rows import take
from kvport.snapshot.state.untyped import Cache, Model

Sampler = Callable[[mx.array], mx.array]

_UNBOUNDED: Final = 1 << 20
"""Width of the generation batch; admission is the scheduler's business, and a full
batch would block prefill."""


@attrs.frozen
class Live:
    """Where a sequence's live caches are, right now."""

    caches: Sequence[Cache]
    row: int
    held: int
    """Tokens of the sequence that the caches hold."""


@attrs.frozen
class Token:
    """One token of the reply; `live` finds it in the cache when this is handed out."""

    uid: int
    token: int
    logprobs: mx.array
    """Log-probabilities that the token was drawn from, shape [vocabulary]."""
    finish: str | None
    """`stop`, `length`, or None while the sequence goes on."""
    last: Live | None
    """Caches of a finished sequence; they are views of the batch: use at once."""


@attrs.frozen
class Step:
    """What one step did."""

    prefilled: tuple[int, ...]
    """Sequences whose prompt advanced to a stop."""
    tokens: tuple[Token, ...]
    drafted: int = 0
    """Guesses that were verified."""
    accepted: int = 0
    """Guesses among `tokens`."""


class Batch:
    """One model's running sequences; all calls from one thread."""

    def __init__(self, model: Model, chunk: int) -> None:
        self._generator = BatchGenerator(
            model,
            prefill_batch_size=1,
            prefill_step_size=chunk,
            completion_batch_size=_UNBOUNDED,
        )

    def insert(
        self,
        segments: Sequence[Sequence[int]],
        *,
        prefix: Sequence[int],
        caches: list[Cache] | None,
        max_tokens: int,
        sampler: Sampler | None,
        stops: Sequence[int],
    ) -> int:
        """Queue a sequence.

        Args:
            segments: the rest of the prompt; prefill stops at the end of each. The last
                one is the prompt's last token alone: mlx-lm holds it back.
            prefix: tokens that `caches` hold.
            caches: restored caches, or None to begin at token 0.
            max_tokens: tokens to generate at most.
            sampler: log-probabilities to tokens; None is greedy.
            stops: token ids that end the reply.

        Returns:
            The sequence's uid.
        """
        (uid,) = self._generator.insert_segments(
            [[list(segment) for segment in segments]],
            max_tokens=[max_tokens],
            caches=[caches],
            all_tokens=[list(prefix)],
            samplers=[sampler],
            stop_sequences=[StopSequences([[stop] for stop in stops])],
        )
        return int(uid)

    def step(self) -> Step:
        """Decode one token for all, then prefill one chunk of one sequence."""
        prompts, replies = self._generator.next()
        return Step(
            prefilled=tuple(r.uid for r in prompts if not r.end_of_prompt),
            tokens=tuple(
                Token(
                    uid=r.uid,
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
        for batch in (self._generator._prompt_batch, self._generator._generation_batch):  # noqa: SLF001 - what this module is for
            if uid in batch.uids:
                row = batch.uids.index(uid)
                return Live(batch.prompt_cache, row, len(batch.tokens[row]))
        return None

    def remove(self, uid: int) -> None:
        """Forget a sequence, wherever it is."""
        self._generator.remove([uid])

    @property
    def stream(self) -> mx.Stream:
        """The stream that computes; captures join it."""
        stream: mx.Stream = self._generator.stream
        return stream

    def close(self) -> None:
        """Give the wired memory limit back."""
        self._generator.close()


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

    batch = Batch(model, chunk=4)
    uids = []
    for _ in range(2):
        segments = [prompt[:4], prompt[4:6], prompt[6:]]
        uids.append(
            batch.insert(
                segments, prefix=[], caches=None, max_tokens=3, sampler=None, stops=[]
            )
        )
    first = batch.step()
    live = batch.live(uids[0])
    if first.prefilled != (uids[0],) or live is None or live.held != 4:
        raise EngineConformanceError("prefill does not stop at the end of a segment")
    found = take(layout, live.caches, row=live.row, held=4, cuts=[(1, 4)], state=False)
    for a, b in zip(expected[0], found[0], strict=True):
        for index, leaf in a[BlobClass.KV].items():
            if not mx.array_equal(leaf, b[BlobClass.KV][index]).item():
                raise EngineConformanceError("rows are not where they are looked for")
    counts = dict.fromkeys(uids, len(prompt))
    for _ in range(12):
        for token in batch.step().tokens:
            live = token.last or batch.live(token.uid)
            counts[token.uid] += 1
            if live is None or live.held != counts[token.uid]:
                raise EngineConformanceError("a handed-out token is not in the cache")
    if set(counts.values()) != {len(prompt) + 3}:
        raise EngineConformanceError("a reply does not end where it was told to")
    batch.close()
