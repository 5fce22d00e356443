"""JSON bodies of requests, decoded strictly.

* Decoded by us, not by the framework, whose decoding takes `"1"` for 1.
* Unknown fields are refused by name, so that a misspelt one cannot go unnoticed. The
  fields of OpenAI's API that change nothing here are listed and ignored; those that
  would change the answer are taken only with the value that means "off".
"""

import re
from typing import Annotated, Any, Final, Literal, TypeVar

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

_AT: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_NAMED: Final = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")

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


class ProbeBody(PrefixBody, frozen=True):
    """A prefix, and which stored state counts."""

    cache: CacheOptions = CacheOptions()


class StreamOptions(_Body, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False


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
    # Taken only as what they are without being sent.
    n: Literal[1] | None = None
    frequency_penalty: Off | None = None
    presence_penalty: Off | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    # Without meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # As above: calls of tools are text here, left to the client to find.
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: bool | None = None
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
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError("the body is not JSON in UTF-8") from error


def _refusal(message: str) -> BadRequestError:
    at, named = _AT.search(message), _NAMED.search(message)
    path = [at["path"]] if at else []
    name = [named["name"]] if named else []
    field = ".".join(path + name)
    # Ours keeps to types and bounds; the value itself is not repeated.
    text = re.sub(r"Invalid enum value .*? - at", "Value not taken - at", message)
    return BadRequestError(text, fields=(field,) if field else ())
