"""Drafts by a second, smaller model of the same vocabulary."""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from kvport.snapshot.engine.models import Model
from kvport.snapshot.errors import SettingError
from kvport.snapshot.state.probe import make_caches
from kvport.snapshot.state.rollback import Snapshot
from kvport.snapshot.state.untyped import Cache, token_ids
from kvport.snapshot.state.untyped import Model as Module

_PROMPT: Final = 1024
"""Tokens of the prompt that are read, at its end. A restored prompt of 100,000 must not
be prefilled for a guess; it is the end that decides what comes next."""
_CHUNK: Final = 512


class DraftModel:
    """A loaded model that drafts for another; called, it makes a sequence's drafter."""

    def __init__(self, model: Model, target: Model) -> None:
        """Check that the one can draft for the other.

        Raises:
            SettingError: the vocabularies differ in size, or the draft model keeps
                state that cannot be stepped back.
        """
        if model.vocabulary != target.vocabulary:
            raise SettingError(
                f"{model.name} cannot draft for {target.name}:"
                f" {model.vocabulary} token ids, not {target.vocabulary}"
            )
        if model.refusal is not None:
            raise SettingError(f"{model.name} cannot draft: {model.refusal}")
        self._model: Final = model

    def __call__(self) -> "DraftModelDrafter":
        """A drafter for a new sequence."""
        module = self._model.module
        return DraftModelDrafter(module, make_caches(module, None))


class DraftModelDrafter:
    """Greedy proposals; its caches hold certain tokens only, between calls."""

    def __init__(self, module: Module, caches: list[Cache]) -> None:
        self._module: Final = module
        self._caches: Final = caches
        self._read: int | None = None
        """Where in the text reading goes on; None before the first call."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`; must be called on the stream that computes."""
        if self._read is None:
            self._read = max(0, len(tokens) - _PROMPT)
        while len(tokens) - self._read > _CHUNK:
            self._likeliest(mx.array(list(tokens[self._read : self._read + _CHUNK])))
            mx.eval([cache.state for cache in self._caches])
            self._read += _CHUNK
        # Proposals are forgotten: those that are accepted come back with the tokens of
        # the next call, in an evaluation that is needed anyway. Any kind of layer can.
        proposed = [self._likeliest(mx.array(list(tokens[self._read :])))]
        self._read = len(tokens)
        snapshot = Snapshot(self._caches)
        while len(proposed) < count:
            proposed.append(self._likeliest(proposed[-1]))
        drafts = mx.concatenate(proposed)
        snapshot.restore()
        mx.eval(drafts, [cache.state for cache in self._caches])
        return token_ids(drafts)

    def _likeliest(self, tokens: mx.array) -> mx.array:
        """The likeliest token after these, shape [1], not computed yet."""
        logits = self._module(tokens[None], cache=self._caches)[:, -1]
        return mx.argmax(logits, axis=-1)
