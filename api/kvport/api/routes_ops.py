"""Health and numbers, for operators and for finding the right server."""

import asyncio
from importlib.metadata import version
from typing import Any

import attrs
import msgspec
from litestar import get
from litestar import route as catch_all

from kvport.api.errors import NotFoundError
from kvport.api.handling import Served
from kvport.api.run_file import fingerprint


@get("/healthz")
async def health(node: Served) -> dict[str, str]:
    """Open to all: that the server is up, and whose it is."""
    return {
        "status": "ok",
        "version": version("kvport"),
        "home": fingerprint(node.key_id),
    }


@get("/api/cache/stats")
async def cache_stats(node: Served) -> dict[str, Any]:
    """Numbers of the cache in bytes, of the models' requests in tokens."""

    def collect() -> dict[str, Any]:
        models = {
            name: attrs.asdict(node.engine.counts(name)) for name in node.engine.models
        }
        return {"cache": msgspec.to_builtins(node.cache.stats()), "models": models}

    return await asyncio.to_thread(collect)


@catch_all(
    ["/", "/{rest:path}"],
    http_method=["GET", "POST", "PUT", "PATCH", "DELETE"],
    include_in_schema=False,
)
async def nothing_here() -> None:
    """Other addresses: a route, so that the guard stands before them, too."""
    raise NotFoundError("nothing is at this address")
