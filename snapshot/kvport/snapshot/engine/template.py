"""Messages to token ids, by the model's own chat template, and where turns part.

The *fork* of a prompt is the longest prefix that it shares with what the conversation
will look like later. Templates of thinking models drop earlier reasoning, so the
generation prompt itself is not part of the next turn. It is found by rendering: the
same messages, followed by two different replies and another user turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from kvport.manifest.limits import TOKENS
from kvport.snapshot.errors import BadPromptError, PromptTooLargeError
from kvport.snapshot.state.untyped import Tokenizer

Message = Mapping[str, Any]

_CHARACTERS: Final = 4 * TOKENS
"""Of text; few tokens are as short on average."""

_NEXT_TURN = {"role": "user", "content": "1"}


@attrs.frozen
class Rendered:
    """A prompt ready to be run."""

    tokens: list[int]
    fork: int | None


def render_text(tokenizer: Tokenizer, text: str) -> Rendered:
    """Tokens of a plain text; nothing is known of how it goes on.

    Raises:
        PromptTooLargeError: no prefix may be as long.
    """
    _check_length([text])
    return Rendered(_ids(tokenizer.encode(text)), None)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    open_reply: bool = True,
) -> Rendered:
    """Tokens of a conversation, ready for the assistant's reply.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation, in the chat API's form.
        tools: tool definitions that the template may list.
        options: further variables of the template (`chat_template_kwargs`).
        open_reply: whether to open the assistant's reply; without it the conversation
            ends as it stands, as the template closes its last turn.

    Raises:
        BadPromptError: the template refuses these messages, or the model has none.
        PromptTooLargeError: no prefix may be as long.
    """
    _check_length(str(message.get("content") or "") for message in messages)
    if not tokenizer.has_chat_template:
        raise BadPromptError("the model has no chat template; send a prompt instead")

    def render(conversation: Sequence[Message], *, open_reply: bool) -> list[int]:
        return _ids(
            tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tools=list(tools) if tools else None,
                add_generation_prompt=open_reply,
                **(options or {}),
            )
        )

    try:
        tokens = render(messages, open_reply=open_reply)
    except Exception as error:
        # A template is the model's code: it may raise anything.
        raise BadPromptError("the chat template refuses these messages") from error
    if not tokens:
        raise BadPromptError("the chat template gives no tokens")
    shared = len(tokens) - 1
    try:
        for reply in ("0", "2"):
            turn = {"role": "assistant", "content": reply}
            later = render([*messages, turn, _NEXT_TURN], open_reply=False)
            shared = min(shared, _common(tokens, later))
    except Exception:  # noqa: BLE001 - see above; without later turns there is no fork
        return Rendered(tokens, None)
    return Rendered(tokens, shared or None)


def _check_length(texts: Iterable[str]) -> None:
    """Refuse what is too long for a prefix before it costs a tokenizer's memory."""
    if sum(map(len, texts)) > _CHARACTERS:
        raise PromptTooLargeError(f"a prompt is at most {_CHARACTERS} characters long")


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((i for i, (a, b) in pairs if a != b), shorter)


def _ids(found: Iterable[int]) -> list[int]:
    return [int(token) for token in found]
