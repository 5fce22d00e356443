"""`/v1/models`: what requests may name, loaded and unloaded while the server runs."""

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import attrs
import msgspec
from litestar import get, post
from msgspec import UnsetType

from kvport.api.bodies import LoadBody, UnloadBody, decode
from kvport.api.errors import BadRequestError
from kvport.api.handling import Http, Served
from kvport.api.operations import takes
from kvport.manifest.timestamps import format_time
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.served import Served as Loaded
from kvport.snapshot.engine.source import directory_at
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.node import Node

_LOOKUP = "lookup"
_OFF = "off"
_ABSENT = "absent"


@get("/v1/models")
async def list_models(node: Served) -> dict[str, Any]:
    """The models that requests may name, and those that were unloaded.

    With why one runs uncached, and what is drafted; of an unloaded one, after how long
    without a request it went, null if someone unloaded it. A request loads none.
    """
    served = node.engine.served
    return {
        "object": "list",
        "data": [_object(name, one) for name, one in served.items()],
        "unloaded": [
            {
                "id": one.name,
                "source": one.source,
                "unloaded": format_time(datetime.fromtimestamp(one.at, UTC)),
                "idle_seconds": one.idle,
            }
            for one in node.engine.departed.all()
            if one.name not in served
        ],
    }


@post("/v1/models/load", status_code=200, operation_class=takes(LoadBody))
async def load_model(request: Http, node: Served) -> dict[str, Any]:
    """Load a model beside those that run; answers once it can be used.

    A model that is loaded from the same place already is answered as it is, with
    `keep_alive` as it is said now.
    """
    body = decode(LoadBody, await request.body())
    keep: float | None
    if isinstance(body.keep_alive, UnsetType):
        keep = None
    else:
        keep = math.inf if body.keep_alive is None else body.keep_alive
    loading = node.residents.start_load(
        body.model, body.name, _tuning(node, body), keep_alive=keep
    )
    model = await asyncio.wrap_future(loading)
    if (one := node.engine.served.get(model.name)) is None:
        raise node.engine.departed.refusal(model.name)
    return _object(model.name, one)


@post("/v1/models/unload", status_code=200, operation_class=takes(UnloadBody))
async def unload_model(request: Http, node: Served) -> dict[str, Any]:
    """Unload a model; answers once its memory is free.

    Its requests finish before, or with `force` end with code `model_unloaded`, as do
    new ones from now on; what was computed is stored.
    """
    body = decode(UnloadBody, await request.body())
    unloading = node.residents.start_unload(body.model, force=body.force)
    gone = await asyncio.wrap_future(unloading)
    cleared = gone.reclaimed
    return {
        "model": gone.name,
        "weight_bytes": gone.weight_bytes,
        "reclaimed": cleared is not None,
        "freed_bytes": cleared.freed_bytes if cleared else 0,
        "kept": cleared.kept if cleared else {},
    }


def _object(name: str, one: Loaded) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvport",
        "cache": _cache(one),
        "drafted": one.drafts,
        "keep_alive": None if one.keep_alive == math.inf else one.keep_alive,
    }


def _cache(one: Loaded) -> dict[str, Any]:
    """Whether the model has a place in the cache, and what is done for it now."""
    state = Tier.OFF.value
    if one.store is not None:
        tier = one.store.tier
        state = _ABSENT if tier is None else tier.value
    return {
        "enabled": one.store is not None,
        "refusal": one.model.refusal,
        "state": state,
    }


def _tuning(node: Node, body: LoadBody) -> Tuning | None:
    """The node's, with what the body says; None if it says nothing."""
    tuning = node.settings.tuning
    if body.points is not None:
        given = msgspec.structs.asdict(body.points)
        numbers = {name: one for name, one in given.items() if one is not None}
        stride = numbers.pop("stride", tuning.stride)
        if stride % tuning.chunk:
            raise BadRequestError(
                f"the stride is not a multiple of the chunk, {tuning.chunk}",
                fields=("points.stride",),
            )
        retention = attrs.evolve(tuning.retention, **numbers)
        tuning = attrs.evolve(tuning, stride=stride, retention=retention)
    if body.draft is not None or body.draft_tokens is not None:
        tuning = attrs.evolve(tuning, draft=_draft(tuning.draft, body))
    said = (body.points, body.draft, body.draft_tokens)
    return None if said == (None, None, None) else tuning


def _draft(usual: DraftSource | None, body: LoadBody) -> DraftSource | None:
    if body.draft == _OFF:
        return None
    source = usual or DraftSource()
    if body.draft == _LOOKUP:
        source = attrs.evolve(source, model=None)
    elif body.draft is not None:
        if (directory := directory_at(body.draft)) is None:
            raise BadRequestError(
                f'"draft" is neither {_LOOKUP}, {_OFF}, nor a directory',
                fields=("draft",),
            )
        source = attrs.evolve(source, model=directory)
    elif usual is None:
        raise BadRequestError(
            '"draft_tokens" needs "draft"', fields=("draft_tokens", "draft")
        )
    return attrs.evolve(source, tokens=body.draft_tokens or source.tokens)
