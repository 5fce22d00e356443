"""Answers in the forms of OpenAI's API: chat and plain, whole and in chunks.

Extensions, which clients of that API skip over: `token_ids` with every choice. Numbers
are written so that they read back to the same bits: a float32 log-probability is exact.
JSON has no infinity: a token that cannot come has the log-probability -9999, as there.
"""

import abc
import itertools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import attrs

from kvport.snapshot.engine.requests import Generated

Json = dict[str, Any]

_NEVER: Final = -9999.0
"""Stands for the log-probability minus infinity."""


@attrs.frozen(kw_only=True)
class Usage:
    """What a request took, in tokens."""

    prompt: int
    generated: int
    restored: int

    def to_json(self) -> Json:
        """As the API has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.restored},
        }


@attrs.frozen(kw_only=True)
class Form(abc.ABC):
    """One answer's frame; the subclasses fill the choice in.

    Attributes:
        model: the model's name.
        decode: text of one token.
        with_logprobs: whether logprobs were asked for.
        ident: the answer's id.
        created: Unix time in seconds.
    """

    model: str
    decode: Callable[[int], str]
    with_logprobs: bool
    ident: str
    created: int = attrs.field(factory=lambda: int(time.time()))

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, tokens: Sequence[Generated], usage: Usage) -> Json:
        """The answer in one piece."""
        text = "".join(token.text for token in tokens)
        choice = self._choice(tokens) | self._whole_text(text)
        return self._frame(self.whole_object, [choice]) | {"usage": usage.to_json()}

    def opening(self) -> Json | None:
        """The chunk before the first token, if the form has one."""
        return None

    def chunk(self, token: Generated, offset: int) -> Json:
        """One token's chunk; `offset` is the length of the text before it."""
        choice = self._choice([token], offset) | self._chunk_text(token.text)
        return self._frame(self.chunk_object, [choice])

    def end_chunk(self, said: Json) -> Json:
        """A chunk after the last token, which says something of the whole answer."""
        return self._frame(self.chunk_object, []) | said

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.ident,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, tokens: Sequence[Generated], offset: int = 0) -> Json:
        return {
            "index": 0,
            "finish_reason": tokens[-1].finish if tokens else None,
            "logprobs": self._logprobs(tokens, offset) if self.with_logprobs else None,
            "token_ids": [token.token for token in tokens],
        }

    @abc.abstractmethod
    def _whole_text(self, text: str) -> Json: ...

    @abc.abstractmethod
    def _chunk_text(self, text: str) -> Json: ...

    @abc.abstractmethod
    def _logprobs(self, tokens: Sequence[Generated], offset: int) -> Json: ...


@attrs.frozen(kw_only=True)
class ChatForm(Form):
    """`/v1/chat/completions`."""

    ident: str = attrs.field(factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Json:
        """The chunk that names the role."""
        choice = self._choice([]) | {"delta": {"role": "assistant", "content": ""}}
        return self._frame(self.chunk_object, [choice])

    def _whole_text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _chunk_text(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def _logprobs(self, tokens: Sequence[Generated], offset: int) -> Json:  # noqa: ARG002 - chats have no offsets
        return {
            "content": [
                self._entry(token.token, token.logprob)
                | {"top_logprobs": [self._entry(t.token, t.logprob) for t in token.top]}
                for token in tokens
            ]
        }

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = self.decode(token)
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": list(text.encode()),
        }


@attrs.frozen(kw_only=True)
class TextForm(Form):
    """`/v1/completions`."""

    ident: str = attrs.field(factory=lambda: f"cmpl-{uuid.uuid4().hex}")

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_text(self, text: str) -> Json:
        return {"text": text}

    _chunk_text = _whole_text

    def _logprobs(self, tokens: Sequence[Generated], offset: int) -> Json:
        """In the older form.

        An offset counts the characters of the reply that were certain before the token:
        tokens that make up one character together begin at the same one.
        """
        lengths = [len(token.text) for token in tokens[:-1]]
        return {
            "tokens": [self.decode(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": list(itertools.accumulate(lengths, initial=offset)),
        }

    def _top(self, token: Generated) -> Json:
        found: Json = {}
        for other in token.top:
            # Several ids may have one text: the likeliest, which is first, stays.
            found.setdefault(self.decode(other.token), _finite(other.logprob))
        return found


def _finite(logprob: float | None) -> float | None:
    return _NEVER if logprob == -math.inf else logprob
