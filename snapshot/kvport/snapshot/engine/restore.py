"""Lookup and restore: from token ids to a model's caches.

`prepare` runs in a worker thread, so that running replies go on: it looks the longest
allowed restore point up, leases its path, and reads the blobs, each checked against its
digest, into host buffers. Damage found on the way is a miss: the damaged path is gone
when the lookup is made again. The engine's thread turns the buffers into caches.
"""

import contextlib
from typing import Final

import attrs

from kvport.manifest.identity import KeyId, Numerics
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.cache import Cache, Chain
from kvport.snapshot.cache.records import ExactRule, Match, Namespace, Selection
from kvport.snapshot.engine.requests import Policy, Request
from kvport.snapshot.errors import DamagedError, GoneError
from kvport.snapshot.state.blobs import Assembly

_ATTEMPTS: Final = 64
"""Each failed attempt removes what it failed on: never reached in earnest."""


@attrs.frozen
class Prepared:
    """What was found for a request."""

    match: Match | None
    assembly: Assembly | None
    chain: Chain | None
    """Where capture goes on; it holds the lease on the restored path."""


def selection(
    request: Request, *, limit: int, local: KeyId, numerics: Numerics
) -> Selection:
    """The restore points that a request allows, at most `limit` tokens."""
    exact = (
        ExactRule(chunk=numerics.chunk, numerics=numerics)
        if request.policy is Policy.EXACT
        else None
    )
    return Selection(limit=limit, local=local, exact=exact, within=request.within)


def prepare(
    cache: Cache,
    namespace: Namespace,
    request: Request,
    *,
    owner: str,
    local: KeyId,
    numerics: Numerics,
) -> Prepared:
    """Find and read the state to restore; at least one token is left to evaluate."""
    tokens = encode_tokens(request.tokens)
    # A prompt's last token is always evaluated: a state cannot step back.
    limit = len(request.tokens) - 1
    chosen = selection(request, limit=limit, local=local, numerics=numerics)
    for _ in range(_ATTEMPTS if request.read and limit else 0):
        match = cache.match(namespace, tokens, chosen)
        if match is None:
            break
        with contextlib.suppress(DamagedError, GoneError):
            return _read(cache, namespace, request, match, owner)
    return Prepared(None, None, _chain(cache, namespace, request, None, owner))


def _read(
    cache: Cache, namespace: Namespace, request: Request, match: Match, owner: str
) -> Prepared:
    assembly = Assembly(namespace.layout, match.position)
    with cache.lease(namespace, match.nodes[-1].id, owner):
        for node in match.nodes:
            for ref in node.blobs:
                if assembly.wants(ref.blob_class, node.start, node.end):
                    data = memoryview(cache.read(namespace, ref))
                    assembly.add(ref.blob_class, node.start, node.end, data)
        return Prepared(
            match, assembly, _chain(cache, namespace, request, match, owner)
        )


def _chain(
    cache: Cache,
    namespace: Namespace,
    request: Request,
    match: Match | None,
    owner: str,
) -> Chain | None:
    if not request.write:
        return None
    return cache.chain(namespace, match.tip if match else ROOT_NODE, owner)
