"""Prompts from request bodies; the one way for completions, exports and probes.

What clients send in two forms becomes one, so that the same conversation always gives
the same tokens: lists of text parts become text, and the arguments of tool calls,
which are JSON in a string, become objects, as templates want them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvport.api.bodies import ChatBody, CompletionBody, PrefixBody
from kvport.api.errors import BadRequestError
from kvport.snapshot.engine.template import Rendered
from kvport.snapshot.node import Node
from kvport.snapshot.prompts import Prompt

_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
        "truncation",
    }
)
"""Arguments of the tokenizer's function, which are no variables of templates."""


def render(node: Node, body: PrefixBody | ChatBody | CompletionBody) -> Rendered:
    """Token ids of a body's prompt; blocking.

    A conversation to run is rendered with the assistant's reply opened. One to export
    or to probe is too, unless it ends with an assistant's message: then it is finished,
    and rendered to its end.

    Raises:
        BadRequestError: messages of a form that is not taken.
        BadPromptError: the prompt cannot be rendered.
        UnknownModelError: there is no such model.
    """
    if isinstance(body, CompletionBody):
        if isinstance(body.prompt, str):
            return node.render(body.model, Prompt(text=body.prompt))
        return node.render(body.model, Prompt(tokens=body.prompt))
    if body.messages is None:
        return node.render(body.model, Prompt(text=body.prompt, tokens=body.tokens))
    finished = body.messages[-1].get("role") == "assistant"
    options = body.chat_template_kwargs or {}
    if reserved := sorted(_RESERVED.intersection(options)):
        raise BadRequestError(
            f'"chat_template_kwargs": {reserved[0]} is no variable of a template',
            fields=("chat_template_kwargs",),
        )
    prompt = Prompt(
        messages=conversation(body.messages), tools=body.tools, options=options
    )
    closed = finished and not isinstance(body, ChatBody)
    return node.render(body.model, prompt, closed=closed)


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form that templates get.

    Raises:
        BadRequestError: no role, or content that is not text.
    """
    found = []
    for number, message in enumerate(messages):
        try:
            found.append(_message(message))
        except ValueError as error:
            text = f'"messages[{number}]": {error}'
            raise BadRequestError(text, fields=("messages",)) from error
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One of them; a `ValueError` says what is wrong with it."""
    if not isinstance(message.get("role"), str):
        raise ValueError("there is no role")  # noqa: TRY004 - one kind for all
    one = dict(message)
    one["content"] = _text(message.get("content"))
    if message.get("tool_calls"):
        one["tool_calls"] = _calls(message["tool_calls"])
    return one


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(map(_part, parts))


def _part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError("the content is not text")


def _calls(calls: object) -> list[dict[str, Any]]:
    try:
        return [_call(call) for call in msgspec.convert(calls, list[dict[str, Any]])]
    except (msgspec.DecodeError, AttributeError, RecursionError) as error:
        raise ValueError("the tool calls are not of the API's form") from error


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not function or not isinstance(function.get("arguments"), str):
        return call
    arguments = msgspec.json.decode(function["arguments"] or "{}")
    return {**call, "function": {**function, "arguments": arguments}}
