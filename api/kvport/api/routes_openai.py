"""`/v1/*completions`, as clients of OpenAI's API know them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import attrs
import msgspec
import structlog
from litestar import Response, post

from kvport.api import media
from kvport.api.bodies import (
    DEFAULT_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    decode,
    fields_note,
)
from kvport.api.errors import BadRequestError
from kvport.api.handling import Http, Served
from kvport.api.messages import render
from kvport.api.openai_forms import ChatForm, Form, TextForm, Usage
from kvport.api.operations import takes
from kvport.api.problems import INTERNAL, Problem
from kvport.api.replies import Reply, unless_gone
from kvport.api.streams import Streamed
from kvport.manifest.errors import KvportError
from kvport.manifest.timestamps import format_time
from kvport.snapshot.cache.records import Pin, Pinned
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.engine.requests import Request, Sampling
from kvport.snapshot.errors import EngineStoppedError
from kvport.snapshot.node import Node

log = structlog.get_logger(__name__)


@post(
    "/v1/chat/completions",
    status_code=200,
    operation_class=takes(ChatBody, fields_note(ChatBody)),
)
async def complete_chat(request: Http, node: Served) -> Response[Any]:
    """Answer a conversation."""
    body = decode(ChatBody, await request.body())
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError(
            '"top_logprobs" needs "logprobs"', fields=("top_logprobs", "logprobs")
        )
    form = ChatForm(
        model=body.model,
        decode=_decoder(node, body.model),
        with_logprobs=bool(body.logprobs),
    )
    top = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    return await _answer(request, node, _Asked(body, form, top, limit))


@post(
    "/v1/completions",
    status_code=200,
    operation_class=takes(CompletionBody, fields_note(CompletionBody)),
)
async def complete_text(request: Http, node: Served) -> Response[Any]:
    """Continue a text or token ids."""
    body = decode(CompletionBody, await request.body())
    form = TextForm(
        model=body.model,
        decode=_decoder(node, body.model),
        with_logprobs=body.logprobs is not None,
    )
    return await _answer(
        request, node, _Asked(body, form, body.logprobs, body.max_tokens)
    )


@attrs.frozen
class _Asked:
    """What both forms of request come down to."""

    body: ChatBody | CompletionBody
    form: Form
    top_logprobs: int | None
    max_tokens: int | None


async def _answer(http: Http, node: Node, asked: _Asked) -> Response[Any]:
    body, form = asked.body, asked.form
    wish = _Wish(node, body)
    request = await asyncio.to_thread(_request, node, asked, wish)
    reply = Reply(node, body.model, request)
    with contextlib.ExitStack() as undo:
        undo.callback(reply.cancel)
        # A request that fails in the queue gets a status, streamed or not.
        restored = await unless_gone(http.receive, reply.restored())
        usage = Usage(prompt=len(request.tokens), generated=0, restored=restored)
        if body.stream:
            undo.pop_all()
            return Streamed(
                _events(reply, form, usage, wish, wants_usage=_wants_usage(body)),
                closing=reply.cancel,
                media_type=media.EVENTS,
                headers={"cache-control": "no-cache"},
            )
        tokens = await unless_gone(http.receive, _all(reply))
        usage = attrs.evolve(usage, generated=len(tokens))
        fate = await unless_gone(http.receive, wish.fate())
        return Response(form.whole(tokens, usage) | fate)


class _Wish:
    """A request's wish to be pinned, if it has one, and what becomes of it."""

    def __init__(self, node: Node, body: GenerationBody) -> None:
        self._node = node
        self._body = body
        # Also of a request whose state goes nowhere, since there is no cache.
        self._found = Pinned(0, None, SkipReason.ABSENT.value)

    def pin(self) -> Pin | None:
        """The wish; refused where nothing is stored for the model."""
        if (wished := self._body.cache.pin) is None:
            return None
        self._node.require_storing(self._body.model)
        return Pin(wished.owner, wished.seconds, self._hear)

    async def fate(self) -> dict[str, Any]:
        """What the answer says of it; waits until what was computed is stored."""
        if self._body.cache.pin is None:
            return {}
        with contextlib.suppress(EngineStoppedError):
            await asyncio.to_thread(self._node.settle, self._body.model)
        found, until = self._found, None
        if found.until is not None:
            until = format_time(datetime.fromtimestamp(found.until, UTC))
        return {
            "cache": {
                "pinned_tokens": found.tokens,
                "pinned_until": until,
                "unpinned_reason": found.reason,
            }
        }

    def _hear(self, found: Pinned) -> None:
        self._found = found


def _request(node: Node, asked: _Asked, wish: _Wish) -> Request:
    """The engine's request; blocking: it runs the tokenizer and the template."""
    body = asked.body
    rendered = render(node, body)
    cache = body.cache
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        tokens=rendered.tokens,
        fork=rendered.fork,
        max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
        sampling=_sampling(body),
        stop_texts=stops,
        ignore_eos=body.ignore_eos,
        top_logprobs=asked.top_logprobs,
        policy=cache.policy or node.settings.policy,
        within=node.path_of(cache.artifact),
        read=cache.read,
        write=cache.write,
        ttl=cache.ttl,
        pin=wish.pin(),
        draft=body.draft,
    )


def _sampling(body: GenerationBody) -> Sampling:
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: getattr(body, name) for name in names}
    return Sampling(**{name: one for name, one in given.items() if one is not None})


def _decoder(node: Node, model: str) -> Any:  # noqa: ANN401 - untyped mlx-lm
    tokenizer = node.engine.model(model).tokenizer
    return lambda token: tokenizer.decode([token])


def _wants_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _all(reply: Reply) -> list[Any]:
    return [token async for token in reply.tokens()]


async def _events(
    reply: Reply, form: Form, usage: Usage, wish: _Wish, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events; after an error one with the problem, and no `[DONE]`."""
    generated = characters = 0
    try:
        if (opening := form.opening()) is not None:
            yield _event(opening)
        async for token in reply.tokens():
            generated += 1
            yield _event(form.chunk(token, characters))
            characters += len(token.text)
        if fate := await wish.fate():
            yield _event(form.end_chunk(fate))
        if wants_usage:
            said = {"usage": attrs.evolve(usage, generated=generated).to_json()}
            yield _event(form.end_chunk(said))
        yield b"data: [DONE]\n\n"
    except KvportError as error:
        yield Problem.of(error).event()
    except Exception:
        log.exception("stream_failed")
        yield INTERNAL.event()


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
