"""`/api/cache/*` for operators: namespaces, plans, removal, pins and scrubbing."""

import asyncio
from typing import Any

from litestar import delete, get, post, put

from kvport.api.admin_bodies import (
    ClearBody,
    GcBody,
    NamespaceBody,
    PlanBody,
    PurgeBody,
    ReleaseBody,
    ScrubBody,
)
from kvport.api.administration import Here
from kvport.api.bodies import decode
from kvport.api.handling import Http, Served
from kvport.api.operations import takes


@get("/api/cache/namespaces")
async def list_namespaces(node: Served) -> dict[str, Any]:
    """Namespaces: what each holds, what is set about it, and whether it can be used."""
    return await asyncio.to_thread(Here(node.orders).namespaces)


@put("/api/cache/namespaces", operation_class=takes(NamespaceBody))
async def set_namespace(request: Http, node: Served) -> dict[str, Any]:
    """Set fields of one namespace, durably and at once; answers how it is then.

    What has expired by a new ttl, and what it holds beyond a new quota, is removed
    before the answer, which says what went in `freed_bytes` and `removed`. To look
    before: `POST /api/cache/plan`.
    """
    body = decode(NamespaceBody, await request.body())
    return await asyncio.to_thread(Here(node.orders).set_namespace, body)


@post("/api/cache/plan", status_code=200, operation_class=takes(PlanBody))
async def plan_removal(request: Http, node: Served) -> dict[str, Any]:
    """What a cap, a floor, quotas or `gc` would remove, and why; nothing is removed."""
    body = decode(PlanBody, await request.body() or b"{}")
    return await asyncio.to_thread(Here(node.orders).plan, body)


@post("/api/cache/gc", status_code=200, operation_class=takes(GcBody))
async def collect_garbage(request: Http, node: Served) -> dict[str, Any]:
    """Remove what is of no use: expired, incompatible, pointless, beyond a quota."""
    decode(GcBody, await request.body() or b"{}")
    return await asyncio.to_thread(Here(node.orders).gc)


@post("/api/cache/clear", status_code=200, operation_class=takes(ClearBody))
async def clear_cache(request: Http, node: Served) -> dict[str, Any]:
    """Remove what meets all filters; without any, `"all": true` is needed.

    What is leased or pinned stays, and is counted, unless `force` is set.
    """
    body = decode(ClearBody, await request.body())
    return await asyncio.to_thread(Here(node.orders).clear, body)


@post("/api/cache/purge", status_code=200, operation_class=takes(PurgeBody))
async def purge_revoked(request: Http, node: Served) -> dict[str, Any]:
    """Do away with all that came from keys which the home's trust list revokes.

    From index, disk, memory and ledger, pinned or not; running requests that had
    restored such state end. Once this is answered none of it is found again. `cache` is
    null if there is no cache at present: then it is purged before it is used again.
    """
    decode(PurgeBody, await request.body() or b"{}")
    return await asyncio.to_thread(Here(node.orders).purge)


@get("/api/cache/pins")
async def list_pins(node: Served) -> dict[str, Any]:
    """Why state stays: leases of what runs, and pins, each with its owner and end."""
    return await asyncio.to_thread(Here(node.orders).pins)


@post("/api/cache/pins/release", status_code=200, operation_class=takes(ReleaseBody))
async def release_pins(request: Http, node: Served) -> dict[str, Any]:
    """End pins of the named owner, and of nobody else."""
    body = decode(ReleaseBody, await request.body())
    return await asyncio.to_thread(Here(node.orders).release, body)


@get("/api/cache/scrub")
async def scrub_progress(node: Served) -> dict[str, Any]:
    """How far the scrub is: files and bytes that were read, and what is left."""
    return await asyncio.to_thread(Here(node.orders).scrub)


@post("/api/cache/scrub", status_code=200, operation_class=takes(ScrubBody))
async def start_scrub(request: Http, node: Served) -> dict[str, Any]:
    """Read all that is stored, slowly, and remove what is damaged.

    It goes on from where the last run stopped; one under way takes the new rate.
    """
    body = decode(ScrubBody, await request.body() or b"{}")
    return await asyncio.to_thread(Here(node.orders).start_scrub, body)


@delete("/api/cache/scrub", status_code=200)
async def stop_scrub(node: Served) -> dict[str, Any]:
    """Stop the scrub, until it is started again."""
    return await asyncio.to_thread(Here(node.orders).stop_scrub)
