"""JSON bodies of requests, decoded strictly.

* Decoded by us, not by the framework, whose decoding takes `"1"` for 1.
* Unknown fields are refused by name, so that a misspelt one cannot go unnoticed. The
  fields of OpenAI's API that change nothing here are listed and ignored; those that
  would change the answer are taken only with the value that means "off": to ignore
  them would be a lie.
"""

import re
from collections.abc import Container, Iterable
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from kvport.api.errors import BadRequestError
from kvport.manifest.limits import TOKENS
from kvport.snapshot.engine.requests import Policy

JSON_BODY_BYTES: Final = 32 << 20
DEFAULT_MAX_TOKENS: Final = 512

TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, lt=1 << 32)]],
    Meta(min_length=1, max_length=TOKENS),
]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1)]
Off = Annotated[float, Meta(ge=0, le=0)]
"""A field that is taken only as 0."""

Ignored = Annotated[Any, Meta(description="Ignored: without effect on the answer.")]

_ONLY: Final = {
    "n": "1",
    "frequency_penalty": "0",
    "presence_penalty": "0",
    "logit_bias": "{}",
    "tool_choice": '"auto"',
    "response_format": '{"type": "text"}',
    "best_of": "1",
    "echo": "false",
    "suffix": '""',
}
"""Fields of completions that are taken only with this value, which changes nothing."""

_AT: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_NAMED: Final = re.compile(r"(?P<how>unknown|required) field `(?P<name>[^`]*)`")

B = TypeVar("B", bound="_Body")


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A JSON object without unknown fields."""


class CacheOptions(_Body, frozen=True):
    """Extension: which stored state a request may restore.

    Attributes:
        policy: the server's default if absent.
        artifact: only the path of this artifact.
    """

    policy: Policy | None = None
    artifact: Annotated[str, Meta(pattern="^blake3:[0-9a-f]{64}$")] | None = None


class PrefixBody(_Body, frozen=True):
    """What to export or to probe: exactly one of messages, prompt and tokens."""

    model: str
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    tokens: TokenIds | None = None
    scope: Literal["default"] = "default"

    def __post_init__(self) -> None:
        given = (self.messages, self.prompt, self.tokens)
        if sum(one is not None for one in given) != 1:
            raise BadRequestError(
                "exactly one of messages, prompt and tokens is needed",
                fields=("messages", "prompt", "tokens"),
            )


class ExportBody(PrefixBody, frozen=True):
    """A prefix, how many of its tokens an export must hold, and how it is written."""

    min_tokens: Annotated[int, Meta(ge=1, le=TOKENS)] | None = None
    compress: bool = False


class ProbeBody(PrefixBody, frozen=True):
    """A prefix, and which stored state counts."""

    cache: CacheOptions = CacheOptions()


class StreamOptions(_Body, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


class _ResponseFormat(_Body, frozen=True):
    type: Literal["text"]


class GenerationBody(_Body, frozen=True):
    """What both completion requests have in common."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache: CacheOptions = CacheOptions()
    ignore_eos: bool = False
    draft: bool = True
    # See `_ONLY`.
    n: Literal[1] | None = None
    frequency_penalty: Off | None = None
    presence_penalty: Off | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    reasoning_effort: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None
    verbosity: Ignored = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Calls of tools are text here, left to the client to find.
    tool_choice: Literal["auto"] | None = None
    response_format: _ResponseFormat | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | TokenIds
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


def decode(kind: type[B], data: bytes) -> B:
    """A request's body.

    Raises:
        BadRequestError: not JSON, or not of this kind; `fields` names the culprit.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, BadRequestError):
            raise error.__cause__ from None
        raise _refusal(str(error), kind.__struct_fields__) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError("the body is not JSON in UTF-8") from error


def fields_note(kind: type[GenerationBody]) -> str:
    """What becomes of the fields of OpenAI's API, for the description of a route."""
    hints = get_type_hints(kind, include_extras=True)
    ignored = [name for name, hint in hints.items() if hint == Ignored]
    only = [name for name in hints if name in _ONLY]
    taken = [name for name in hints if name not in {*ignored, *only}]
    return (
        f"Taken: {_listed(taken)}.\n\n"
        f"Ignored, without effect on the answer: {_listed(ignored)}.\n\n"
        "Refused unless they are absent, null or, what means the same, as stated: "
        + ", ".join(f"`{name}` ({_ONLY[name]})" for name in only)
        + ".\n\nAll other fields are refused."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refusal(message: str, known: Container[str]) -> BadRequestError:
    """A refusal in our words, which keep to names, types and bounds, not to values."""
    at, named = _AT.search(message), _NAMED.search(message)
    path = [at["path"]] if at else []
    name = [named["name"]] if named else []
    field = ".".join(path + name)
    outer = re.split(r"[.\[]", field)[0]
    if outer in known and outer in _ONLY:
        text = f'"{outer}" is not supported, except as {_ONLY[outer]}'
    elif named:
        how = "is not supported" if named["how"] == "unknown" else "is missing"
        text = f'"{field}" {how}'
    else:
        what = message[: at.start()] if at else message
        if what.startswith("Invalid enum value"):
            what = "Not one of the values that it takes"
        where = f'"{field}"' if field else "the body"
        text = f"{where}: {what[:1].lower()}{what[1:]}"
    return BadRequestError(text, fields=(field,) if field else ())
