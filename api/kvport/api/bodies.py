"""JSON bodies of requests, decoded strictly.

* Decoded by us, not by the framework, whose decoding takes `"1"` for 1.
* Unknown fields are refused by name, so that a misspelt one cannot go unnoticed. The
  fields of OpenAI's API that change nothing here are listed and ignored; those that
  would change the answer are taken only with the value that means "off": to ignore
  them would be a lie.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvport.api.errors import BadRequestError
from kvport.manifest.limits import RECIPIENTS, TOKENS
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.refusals import explain

JSON_BODY_BYTES: Final = 32 << 20
DEFAULT_MAX_TOKENS: Final = 512

PublicKeyHex = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{64}$(?!\n)",
        description="Public key as `kvport keys recipient` prints it.",
    ),
]
TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, lt=1 << 32)]],
    Meta(min_length=1, max_length=TOKENS),
]
Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Seconds = Annotated[int, Meta(ge=1, le=315_360_000)]
"""Up to ten years."""
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
ArtifactName = Annotated[
    str,
    Meta(
        pattern=r"^blake3:[0-9a-f]{64}$(?!\n)",
        description="an artifact's id: blake3: and 64 hex digits",
    ),
]
SessionLabel = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)",
        description="1 to 64 letters, digits, dots, dashes and underscores",
    ),
]
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

B = TypeVar("B", bound=msgspec.Struct)


class Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A JSON object without unknown fields."""


class CacheOptions(Body, frozen=True):
    """Extension: which stored state a request may restore.

    Attributes:
        policy: the server's default if absent.
        artifact: only the path of this artifact.
    """

    policy: Policy | None = None
    artifact: ArtifactName | None = None


class PinBody(Body, frozen=True):
    """A wish that what a request stores stays, up to its reply's end.

    Attributes:
        owner: whose wish it is; a later one of the same owner replaces it.
        seconds: from the end of the request, up to 30 days.
    """

    owner: Annotated[
        str,
        Meta(
            pattern=r"^[ -~]{1,64}$(?!\n)",
            description="1 to 64 printable characters of ASCII",
        ),
    ]
    seconds: Annotated[int, Meta(ge=1, le=2_592_000)]


class RequestCacheOptions(CacheOptions, frozen=True):
    """Extension: what a request may restore, and what it leaves behind.

    Attributes:
        read: whether anything is restored, from disk or from memory.
        write: whether anything is stored, or kept in memory for the next turn.
        ttl: seconds after its last use until what is stored expires, up to ten years;
            the namespace's if absent.
        pin: keeps what is stored, whatever else needs room.
    """

    read: bool = True
    write: bool = True
    ttl: Seconds | None = None
    pin: PinBody | None = None

    def __post_init__(self) -> None:
        for name in ("ttl", "pin"):
            if not self.write and getattr(self, name) is not None:
                raise BadRequestError(
                    f'"cache.{name}" is of what is written, and "cache.write" is false',
                    fields=(f"cache.{name}", "cache.write"),
                )
        if not self.read and self.artifact is not None:
            raise BadRequestError(
                '"cache.artifact" is to be restored, and "cache.read" is false',
                fields=("cache.artifact", "cache.read"),
            )


class PrefixBody(Body, frozen=True):
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
    """A prefix, how many of its tokens an export must hold, and how it is written.

    `session` is a label of the conversation that it is of: whoever imports takes no
    older artifact of it afterwards.
    """

    min_tokens: Annotated[int, Meta(ge=1, le=TOKENS)] | None = None
    compress: bool = False
    session: SessionLabel | None = None
    recipients: Annotated[tuple[PublicKeyHex, ...], Meta(max_length=RECIPIENTS)] = ()


class ProbeBody(PrefixBody, frozen=True):
    """A prefix, and which stored state counts."""

    cache: CacheOptions = CacheOptions()


class PointsBody(Body, frozen=True):
    """Which restore points a model's prompts get, and how many of them stay.

    Each number is the server's if it is absent; `stride` is the distance of points,
    the others are those of `Retention`.
    """

    stride: Count | None = None
    newest: Count | None = None
    every: Count | None = None
    forks: Count | None = None
    prompts: Count | None = None
    replies: Count | None = None


class LoadBody(Body, frozen=True):
    """`POST /v1/models/load`.

    Attributes:
        model: a directory of the server's machine, or a Hugging Face id.
        name: what requests call it; the last part of `model` if absent.
        keep_alive: seconds without a request after which it is unloaded; null for
            never, the server's if absent.
        points: the server's if absent.
        draft: `lookup`, `off`, or a draft model's directory; the server's if absent.
        draft_tokens: guesses that are verified at once, at most.
    """

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    name: (
        Annotated[
            str,
            Meta(
                pattern=r"^[!-~]{1,128}$(?!\n)",
                description="1 to 128 visible characters of ASCII",
            ),
        ]
        | None
    ) = None
    keep_alive: Seconds | UnsetType | None = UNSET
    points: PointsBody | None = None
    draft: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    draft_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None


class UnloadBody(Body, frozen=True):
    """`POST /v1/models/unload`.

    Attributes:
        model: its name.
        force: whether its requests are ended, and not waited for.
    """

    model: str
    force: bool = False


class StreamOptions(Body, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


class _ResponseFormat(Body, frozen=True):
    type: Literal["text"]


class GenerationBody(Body, frozen=True):
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
    cache: RequestCacheOptions = RequestCacheOptions()
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
        raise _refusal(str(error), kind) from error
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


def _refusal(message: str, kind: type[msgspec.Struct]) -> BadRequestError:
    """A refusal in our words, which keep to names, types and bounds, not to values."""
    refused = explain(message, kind)
    field = refused.field
    outer = re.split(r"[.\[]", field)[0]
    if outer in kind.__struct_fields__ and outer in _ONLY:
        text = f'"{outer}" is not supported, except as {_ONLY[outer]}'
    elif refused.how:
        how = "is not supported" if refused.how == "unknown" else "is missing"
        text = f'"{field}" {how}'
    else:
        where = f'"{field}"' if field else "the body"
        text = f"{where}: {refused.what}"
    return BadRequestError(text, fields=(field,) if field else ())
