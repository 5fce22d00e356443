"""Health and numbers, for operators and for finding the right server."""

import asyncio
from importlib.metadata import version as installed
from typing import Any

import attrs
from litestar import get
from litestar import route as catch_all
from litestar.params import FromPath

from kvport.api import media
from kvport.api.errors import NotFoundError
from kvport.api.handling import Served
from kvport.api.metrics import CONTENT_TYPE, exposition
from kvport.api.numbers import cache_numbers, volume_numbers
from kvport.api.run_file import fingerprint
from kvport.api.schema_files import schema
from kvport.snapshot.errors import CacheAbsentError
from kvport.snapshot.node import Node


@get("/healthz")
async def health(node: Served) -> dict[str, str]:
    """Open to all: that the server is up, whose it is, and how its cache is."""
    return {
        "status": "ok",
        "cache": node.health().state,
        "version": installed("kvport"),
        "home": fingerprint(node.key_id),
    }


@get("/api/cache/stats")
async def cache_stats(node: Served) -> dict[str, Any]:
    """Numbers of the cache in bytes, of the models' requests in tokens.

    Those of the cache are null while there is none; `volume` says why.
    """
    return await asyncio.to_thread(_numbers, node)


def _numbers(node: Node) -> dict[str, Any]:
    """All of them; blocking."""
    stores = [one.store for one in node.engine.served.values()]
    loaded = {one.namespace.id for one in stores if one is not None}
    try:
        with node.volume.using() as cache:
            stats = cache.stats()
    except CacheAbsentError:
        stats = None
    return {
        **cache_numbers(stats, loaded, node.orders.names),
        "volume": volume_numbers(node.health()),
        "models": {
            name: attrs.asdict(counts) for name, counts in node.engine.counts.items()
        },
    }


@get("/metrics", media_type=CONTENT_TYPE)
async def metrics(node: Served) -> bytes:
    """The same numbers for Prometheus, which sends the key as a bearer token."""
    return await asyncio.to_thread(lambda: exposition(_numbers(node)))


@get("/schemas/{version:str}/{name:str}", media_type=media.SCHEMA)
async def get_schema(version: FromPath[str], name: FromPath[str]) -> bytes:
    """A published JSON Schema, such as v1/manifest.schema.json; see docs/format.md."""
    return schema(f"{version}/{name}")


@catch_all(
    ["/", "/{rest:path}"],
    http_method=["GET", "POST", "PUT", "PATCH", "DELETE"],
    include_in_schema=False,
)
async def nothing_here() -> None:
    """Other addresses: a route, so that the guard stands before them, too."""
    raise NotFoundError("nothing is at this address")
