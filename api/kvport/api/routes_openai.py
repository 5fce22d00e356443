"""`/v1/*`: models and completions, as clients of OpenAI's API know them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import attrs
import msgspec
import structlog
from litestar import Response, get, post

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
from kvport.snapshot.engine.requests import Request, Sampling
from kvport.snapshot.node import Node

log = structlog.get_logger(__name__)


@get("/v1/models")
async def list_models(node: Served) -> dict[str, Any]:
    """The models that requests may name; why one runs uncached, and what is drafted."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "kvport",
                "cache": {
                    "enabled": node.engine.store(name) is not None,
                    "refusal": model.refusal,
                },
                "drafted": node.engine.drafts(name),
            }
            for name, model in node.engine.models.items()
        ],
    }


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
    request = await asyncio.to_thread(_request, node, asked)
    reply = Reply(node, body.model, request)
    with contextlib.ExitStack() as undo:
        undo.callback(reply.cancel)
        # A request that fails in the queue gets a status, streamed or not.
        restored = await unless_gone(http.receive, reply.restored())
        usage = Usage(prompt=len(request.tokens), generated=0, restored=restored)
        if body.stream:
            undo.pop_all()
            return Streamed(
                _events(reply, form, usage, wants_usage=_wants_usage(body)),
                closing=reply.cancel,
                media_type=media.EVENTS,
                headers={"cache-control": "no-cache"},
            )
        tokens = await unless_gone(http.receive, _all(reply))
        usage = attrs.evolve(usage, generated=len(tokens))
        return Response(form.whole(tokens, usage))


def _request(node: Node, asked: _Asked) -> Request:
    """The engine's request; blocking: it runs the tokenizer and the template."""
    body = asked.body
    rendered = render(node, body)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        tokens=rendered.tokens,
        fork=rendered.fork,
        max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
        sampling=_sampling(body),
        stop_texts=stops,
        ignore_eos=body.ignore_eos,
        top_logprobs=asked.top_logprobs,
        policy=body.cache.policy or node.settings.policy,
        within=node.path_of(body.cache.artifact),
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
    reply: Reply, form: Form, usage: Usage, *, wants_usage: bool
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
        if wants_usage:
            yield _event(form.usage_chunk(attrs.evolve(usage, generated=generated)))
        yield b"data: [DONE]\n\n"
    except KvportError as error:
        yield Problem.of(error).event()
    except Exception:
        log.exception("stream_failed")
        yield INTERNAL.event()


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
