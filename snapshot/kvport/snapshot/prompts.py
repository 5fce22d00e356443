"""Prompts as callers have them, and their token ids by a model's own tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvport.snapshot.engine.template import Rendered, render_chat, render_text
from kvport.snapshot.errors import BadPromptError
from kvport.snapshot.state.untyped import Tokenizer


@attrs.frozen(kw_only=True)
class Prompt:
    """What to run or export: exactly one of text, tokens and messages."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None


def rendered(tokenizer: Tokenizer, prompt: Prompt, *, closed: bool = False) -> Rendered:
    """Token ids of a prompt: see `Node.render`.

    Raises:
        BadPromptError: the prompt cannot be rendered.
    """
    if prompt.messages is not None:
        return render_chat(
            tokenizer,
            prompt.messages,
            tools=prompt.tools,
            options=prompt.options,
            open_reply=not closed,
        )
    if prompt.text is not None:
        return render_text(tokenizer, prompt.text)
    if prompt.tokens is not None:
        return Rendered(list(prompt.tokens), None)
    raise BadPromptError("a prompt is a text, token ids or messages")
