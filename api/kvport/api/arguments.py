"""What a client asks for, typed, and the bodies that say it."""

from collections.abc import Sequence
from typing import Any, TypedDict

from kvport.manifest.recipients import Recipient


class PromptArguments(TypedDict, total=False):
    """A prompt: exactly one of messages, prompt and tokens."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]
    prompt: str
    tokens: list[int]


class ExportArguments(PromptArguments, total=False):
    """A prompt, and how its state is exported; what is absent is the server's default.

    `min_tokens` refuses to export less, with code `not_restorable`; `compress` makes it
    smaller, without loss; `session` is a label of the conversation, of which nobody
    imports an older artifact after this one; `recipients` are those who can read it.
    """

    min_tokens: int | None
    compress: bool
    session: str | None
    recipients: Sequence[Recipient]


class PinArguments(TypedDict):
    """Whose wish it is that state stays, and for how many seconds."""

    owner: str
    seconds: int


class CompletionArguments(PromptArguments, total=False):
    """A prompt and how to continue it; what is absent is the server's default.

    `logprobs` is the number of alternatives to report with each token's own. `read` and
    `write` say whether state is restored and stored, `ttl` after how many seconds
    without use it expires, `pin` who keeps it in any case.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: list[str]
    logprobs: int
    ignore_eos: bool
    draft: bool
    policy: str
    artifact: str
    read: bool
    write: bool
    ttl: int
    pin: PinArguments


class LoadArguments(TypedDict, total=False):
    """How a model is loaded; what is absent is the server's default.

    `keep_alive` is in seconds without a request, None for ever; `points` has the keys
    of `--points`; `draft` is `lookup`, `off` or a directory.
    """

    name: str
    keep_alive: int | None
    points: dict[str, int]
    draft: str
    draft_tokens: int


def export_body(model: str, arguments: ExportArguments) -> dict[str, Any]:
    """Body of an export."""
    body: dict[str, Any] = {"model": model, **arguments}
    if "recipients" in arguments:
        keys = [recipient.raw.hex() for recipient in arguments["recipients"]]
        body["recipients"] = keys
    return {name: value for name, value in body.items() if value is not None}


def completion_body(
    model: str, arguments: CompletionArguments
) -> tuple[str, dict[str, Any]]:
    """Address and body of a streamed completion."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **arguments,
    }
    names = ("policy", "artifact", "read", "write", "ttl", "pin")
    body["cache"] = {name: body.pop(name) for name in names if name in body}
    if "messages" in body:
        if "logprobs" in body:
            body["top_logprobs"] = body["logprobs"]
            body["logprobs"] = True
        return "/v1/chat/completions", body
    if "tokens" in body:
        body["prompt"] = body.pop("tokens")
    return "/v1/completions", body
