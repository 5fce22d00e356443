"""`/api/cache/*`: artifacts out and in, and what the cache holds."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import attrs
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from kvport.api import media
from kvport.api.artifacts import facts
from kvport.api.bodies import ExportBody, ProbeBody, decode
from kvport.api.errors import BadRequestError, StalledError
from kvport.api.handling import Http, Served
from kvport.api.messages import render
from kvport.api.operations import takes, takes_artifact
from kvport.api.replies import ClientGoneError, unless_gone
from kvport.api.streams import Held, Streamed, incoming, outgoing
from kvport.manifest.digests import ArtifactId
from kvport.manifest.limits import ARTIFACT_BYTES
from kvport.manifest.recipients import Recipient
from kvport.snapshot.engine.requests import Request
from kvport.snapshot.errors import (
    NotRestorableError,
    OverloadedError,
    TooLargeError,
)
from kvport.snapshot.node import Node, ProbeResult
from kvport.snapshot.transfer.exporter import Export
from kvport.snapshot.transfer.importer import Import

IMPORTS: Final = 4
"""Imports at once: each has a thread, and staged bytes that are not yet counted on."""

PATIENCE_SECONDS: Final = 60.0
"""How long an import's client may send nothing: it holds a place meanwhile."""


@attrs.frozen
class Imports:
    """What bounds imports: the patience with each, in seconds, and their number."""

    patience: float
    slots: asyncio.Semaphore = attrs.field(factory=lambda: asyncio.Semaphore(IMPORTS))


@post("/api/cache/export", status_code=200, operation_class=takes(ExportBody))
async def export_prefix(request: Http, node: Served) -> Response[Any]:
    """The longest restorable prefix of a prompt, as a signed artifact.

    How much that is say the headers Kvport-Restorable-Tokens and Kvport-Prompt-Tokens;
    with `min_tokens` less than that is refused. With `compress` it is smaller, and
    takes longer to begin. With `session`, its place in that conversation is signed: no
    older artifact of it is imported afterwards. With `recipients`, public X25519 keys
    in hex, only their holders can read it. With `Accept: application/json` the artifact
    is kept instead, and described.
    """
    body = decode(ExportBody, await request.body())
    tokens = (await asyncio.to_thread(render, node, body)).tokens
    held = Held("export", lambda: _enough(node, body, tokens), Export.close)
    as_json = request.accept.best_match([media.ARTIFACT, media.JSON]) == media.JSON
    with contextlib.ExitStack() as undo:
        undo.callback(held.close)
        export = await unless_gone(request.receive, held.opened())
        if as_json:
            await held.run(node.artifacts.keep)
            url = f"{request.base_url}api/cache/artifacts/{export.artifact_id}"
            facts = {"prompt_tokens": len(tokens), "url": url}
            return Response(export.describe() | facts)
        undo.pop_all()
    return _tar(held, export, {"kvport-prompt-tokens": str(len(tokens))})


def _enough(node: Node, body: ExportBody, tokens: Sequence[int]) -> Export:
    """An open export of at least as much as was asked for; blocking."""
    if (body.min_tokens or 0) > len(tokens):
        raise BadRequestError(
            f'"min_tokens" is above the {len(tokens)} tokens of the prompt',
            fields=("min_tokens",),
        )
    recipients = [Recipient(bytes.fromhex(key)) for key in body.recipients]
    export = node.export(
        body.model,
        tokens,
        compress=body.compress,
        session=body.session or "",
        recipients=recipients,
    )
    if export.restorable_tokens < (body.min_tokens or 0):
        export.close()
        raise NotRestorableError(
            f"only {export.restorable_tokens} of {len(tokens)} prompt tokens are"
            " restorable, fewer than min_tokens"
        )
    return export


@post(
    "/api/cache/import",
    status_code=200,
    # The framework's limit would hold for streams, too.
    request_max_body_size=None,
    operation_class=takes_artifact(),
)
async def import_artifact(
    request: Http,
    node: Served,
    imports: NamedDependency[Imports],
    model: FromQuery[str | None] = None,
) -> dict[str, Any]:
    """Verify an artifact and admit its state, all or nothing."""
    if (request.content_length or 0) > ARTIFACT_BYTES:
        raise TooLargeError("the announced body is above the limit of artifacts")
    if imports.slots.locked():
        raise OverloadedError("too many imports run at once")
    async with imports.slots:
        held = Held("import", lambda: node.start_import(model), Import.abort)
        try:
            await incoming(held, _body(request, imports.patience), Import.feed)
            result = await held.run(Import.finish)
        finally:
            held.close()
    return {
        "artifact_id": result.artifact_id,
        "restored_tokens": result.restored_tokens,
        "admitted_segments": result.admitted_segments,
        "present_segments": result.present_segments,
        "model": result.model,
    }


@post("/api/cache/probe", status_code=200, operation_class=takes(ProbeBody))
async def probe_prefix(request: Http, node: Served) -> ProbeResult:
    """What of a prompt is stored, and what a request would restore now."""
    body = decode(ProbeBody, await request.body())

    def probe() -> ProbeResult:
        asked = Request(
            tokens=render(node, body).tokens,
            max_tokens=1,
            policy=body.cache.policy or node.settings.policy,
            within=node.path_of(body.cache.artifact),
        )
        return node.probe(body.model, asked)

    return await asyncio.to_thread(probe)


@get("/api/cache/artifacts")
async def list_artifacts(node: Served) -> dict[str, Any]:
    """Kept exports and admitted imports, newest first."""
    found = await asyncio.to_thread(node.artifacts.all)
    return {"artifacts": [facts(one.record, stored=one.stored) for one in found]}


@get("/api/cache/artifacts/{artifact:str}")
async def get_artifact(
    request: Http, node: Served, artifact: FromPath[str]
) -> Response[Any]:
    """One artifact: its facts; a kept export again with its media type as `Accept`."""
    ident = ArtifactId(artifact)
    if request.accept.best_match([media.JSON, media.ARTIFACT]) != media.ARTIFACT:
        record = await asyncio.to_thread(node.artifacts.find, ident)
        return Response(facts(record, stored=True))
    held = Held("export", lambda: node.artifacts.reopen(ident), Export.close)
    with contextlib.ExitStack() as undo:
        undo.callback(held.close)
        export = await unless_gone(request.receive, held.opened())
        undo.pop_all()
    return _tar(held, export)


def _tar(
    held: Held[Export], export: Export, headers: Mapping[str, str] | None = None
) -> Streamed:
    return Streamed(
        outgoing(held, Export.stream),
        closing=held.close,
        media_type=media.ARTIFACT,
        headers={
            "content-length": str(export.size),
            "kvport-artifact": export.artifact_id,
            "kvport-restorable-tokens": str(export.restorable_tokens),
            **(headers or {}),
        },
    )


async def _body(request: Http, patience: float) -> AsyncGenerator[bytes, None]:
    """The request's body as it comes.

    Raises:
        ClientGoneError: it ended early.
        StalledError: nothing came for `patience` seconds.
        TooLargeError: it is longer than any artifact.
    """
    received, more = 0, True
    while more:
        try:
            async with asyncio.timeout(patience):
                event = await request.receive()
        except TimeoutError as error:
            message = f"the client sent nothing for {patience:g} seconds"
            raise StalledError(message) from error
        if event["type"] != "http.request":
            raise ClientGoneError
        received += len(event["body"])
        if received > ARTIFACT_BYTES:
            raise TooLargeError("the body is above the limit of artifacts")
        more = event["more_body"]
        yield event["body"]
