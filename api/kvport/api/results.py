"""What the client returns."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs


@attrs.frozen(kw_only=True)
class Health:
    """That a server is up, how its cache is, and a fingerprint of its home's key."""

    status: str
    version: str
    home: str
    cache: str


@attrs.frozen(kw_only=True)
class ModelInfo:
    """A model; `refusal` says why it runs without the cache, if it does.

    `state` is what is done for it at present: its tier, or `absent` while there is no
    cache.
    """

    name: str
    cached: bool
    refusal: str | None
    state: str
    drafted: bool
    keep_alive: int | None = None
    """Seconds without a request after which it is unloaded; None for never."""

    @classmethod
    def from_json(cls, one: Mapping[str, Any]) -> Self:
        """From an entry of `GET /v1/models`."""
        cache = one["cache"]
        return cls(
            name=one["id"],
            cached=cache["enabled"],
            refusal=cache["refusal"],
            state=cache["state"],
            drafted=one["drafted"],
            keep_alive=one["keep_alive"],
        )


@attrs.frozen(kw_only=True)
class UnloadedModel:
    """A model that was loaded since the server's start, and is not any more.

    Attributes:
        name: what requests called it.
        source: its directory on the server's machine.
        unloaded: when it was unloaded last, RFC 3339.
        idle_seconds: without a request, after which it went; None if someone did it.
    """

    name: str
    source: str
    unloaded: str
    idle_seconds: float | None

    @classmethod
    def from_json(cls, one: Mapping[str, Any]) -> Self:
        """From an entry of `unloaded` in `GET /v1/models`."""
        return cls(name=one["id"], **{k: v for k, v in one.items() if k != "id"})


@attrs.frozen(kw_only=True)
class UnloadInfo:
    """What became of a model that was unloaded.

    Attributes:
        model: what it was called.
        weight_bytes: bytes of memory that its weights took.
        reclaimed: whether its state in the cache was to go.
        freed_bytes: allocated bytes of what went.
        kept: segments that stayed all the same, by what held them.
    """

    model: str
    weight_bytes: int
    reclaimed: bool
    freed_bytes: int
    kept: dict[str, int]


@attrs.frozen(kw_only=True)
class Logprob:
    """A token's text and its log-probability."""

    token: str
    logprob: float


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens of the prompt, of the reply, and of the prompt that were restored."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def from_json(cls, usage: Mapping[str, Any]) -> Self:
        """From an answer's `usage`."""
        return cls(
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )


@attrs.frozen(kw_only=True)
class Pinned:
    """What became of a request's wish to be pinned.

    Attributes:
        pinned_tokens: length of what is kept; 0 for nothing.
        pinned_until: RFC 3339; None if nothing is kept.
        unpinned_reason: why the rest is not kept; None if all is.
    """

    pinned_tokens: int
    pinned_until: str | None
    unpinned_reason: str | None


@attrs.frozen(kw_only=True)
class Delta:
    """A piece of a reply.

    Attributes:
        text: may be empty.
        tokens: token ids of the piece.
        logprobs: one for each of them, if asked for.
        top_logprobs: the likeliest alternatives for each of them, if asked for.
        finish_reason: `stop` or `length` with the last token.
        pinned: after the last token, where a pin was asked for.
        usage: last of all.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[Logprob, ...], ...] = ()
    finish_reason: str | None = None
    pinned: Pinned | None = None
    usage: Usage | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """From a chunk of either completion's stream."""
        if not content["choices"]:
            if "cache" in content:
                return cls(pinned=Pinned(**content["cache"]))
            return cls(usage=Usage.from_json(content["usage"]))
        (choice,) = content["choices"]
        text = choice["delta"]["content"] if "delta" in choice else choice["text"]
        logprobs, top = _logprobs(choice["logprobs"] or {})
        return cls(
            text=text,
            tokens=tuple(choice["token_ids"]),
            logprobs=logprobs,
            top_logprobs=top,
            finish_reason=choice["finish_reason"],
        )


def _logprobs(
    found: Mapping[str, Any],
) -> tuple[tuple[float, ...], tuple[tuple[Logprob, ...], ...]]:
    if "content" in found:
        entries = found["content"]
        return tuple(entry["logprob"] for entry in entries), tuple(
            tuple(
                Logprob(token=top["token"], logprob=top["logprob"])
                for top in entry["top_logprobs"]
            )
            for entry in entries
        )
    return tuple(found.get("token_logprobs", ())), tuple(
        tuple(Logprob(token=text, logprob=value) for text, value in top.items())
        for top in found.get("top_logprobs", ())
    )


@attrs.frozen(kw_only=True)
class Completion:
    """A whole reply.

    Attributes:
        text: the reply.
        tokens: its token ids.
        logprobs: one for each, if asked for.
        top_logprobs: the likeliest alternatives for each, if asked for.
        finish_reason: `stop` or `length`.
        prompt_tokens: length of the prompt.
        cached_tokens: of these, how many were restored.
        ttft_s: seconds to the first token, seen from here.
        total_s: seconds to the end.
        pinned: what is pinned, if that was asked for.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[Logprob, ...], ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    pinned: Pinned | None = None

    @classmethod
    def of(cls, deltas: Sequence[Delta], *, ttft_s: float, total_s: float) -> Self:
        """All of a stream put together."""
        usage = next(delta.usage for delta in deltas if delta.usage is not None)
        return cls(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(one for delta in deltas for one in delta.logprobs),
            top_logprobs=tuple(one for delta in deltas for one in delta.top_logprobs),
            finish_reason=next(d.finish_reason for d in deltas if d.finish_reason),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            ttft_s=ttft_s,
            total_s=total_s,
            pinned=next((d.pinned for d in deltas if d.pinned is not None), None),
        )


@attrs.frozen(kw_only=True)
class Download:
    """An artifact that was written.

    Attributes:
        artifact_id: digest of its manifest.
        restorable_tokens: length of the prefix that it holds.
        size_bytes: of the file.
    """

    artifact_id: str
    restorable_tokens: int
    size_bytes: int

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Self:
        """From the headers of the artifact's response."""
        return cls(**cls._read(headers))

    @classmethod
    def _read(cls, headers: Mapping[str, str]) -> dict[str, Any]:
        return {
            "artifact_id": headers["kvport-artifact"],
            "restorable_tokens": int(headers["kvport-restorable-tokens"]),
            "size_bytes": int(headers["content-length"]),
        }


@attrs.frozen(kw_only=True)
class ExportInfo(Download):
    """An artifact that was made of a prompt, of this length, and written."""

    prompt_tokens: int

    @classmethod
    def _read(cls, headers: Mapping[str, str]) -> dict[str, Any]:
        prompt = int(headers["kvport-prompt-tokens"])
        return super()._read(headers) | {"prompt_tokens": prompt}


@attrs.frozen(kw_only=True)
class KeptExport:
    """An artifact that stays with the server."""

    artifact_id: str
    restorable_tokens: int
    prompt_tokens: int
    size_bytes: int
    url: str
    format_version: int
    model: str
    quant: dict[str, Any]
    engine_version: str
    prefix_digest: str
    session: dict[str, Any]


@attrs.frozen(kw_only=True)
class ImportInfo:
    """What an import admitted, and what was there before."""

    artifact_id: str
    restored_tokens: int
    admitted_segments: int
    present_segments: int
    model: str


@attrs.frozen(kw_only=True)
class ProbeInfo:
    """What the cache holds of a prompt, in tokens."""

    prompt_tokens: int
    stored_tokens: int
    restorable_tokens: int


@attrs.frozen(kw_only=True)
class Artifact:
    """An artifact that a server knows.

    Attributes:
        artifact_id: digest of its manifest.
        direction: `exported` or `admitted`.
        model: under which its state is served there.
        issuer: key id of who signed it.
        created: as signed, RFC 3339.
        expires: until when it can be imported.
        recorded: when it was kept or admitted.
        restorable_tokens: length of the prefix.
        size_bytes: of the file.
        stored: whether its state is still there.
    """

    artifact_id: str
    direction: str
    model: str
    issuer: str
    created: str
    expires: str
    recorded: str
    restorable_tokens: int
    size_bytes: int
    stored: bool
