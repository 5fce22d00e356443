"""Lookup and restore: from token ids to a model's caches.

`prepare` runs in a worker thread, so that running replies go on: it looks the longest
allowed restore point up, leases its path, and reads the blobs, each checked against its
digest, into host buffers. Damage found on the way is a miss: the damaged path is gone
when the lookup is made again. The engine's thread turns the buffers into caches.
"""

from typing import Final

import attrs
import structlog

from kvport.manifest.identity import KeyId, Numerics
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.cache import Cache, Chain
from kvport.snapshot.cache.records import ExactRule, Match, Namespace, Selection
from kvport.snapshot.engine.requests import Policy, Request
from kvport.snapshot.errors import DamagedError, GoneError, StorageError
from kvport.snapshot.state.blobs import Assembly

log = structlog.get_logger(__name__)

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
    request: Request, layout: StateLayout, *, local: KeyId, numerics: Numerics
) -> Selection:
    """The restore points that a request allows.

    A prompt's last token is always evaluated: a state cannot step back. An empty cache
    would stop at the fork of a model with whole layers, and compute what comes after it
    in another shape than cold state was: `exact` restores up to the fork only.
    """
    limit, exact = len(request.tokens) - 1, None
    if request.policy is Policy.EXACT:
        exact = ExactRule(chunk=numerics.chunk, numerics=numerics)
        if request.fork is not None and layout.has(BlobClass.STATE):
            limit = min(limit, request.fork)
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
    chosen = selection(request, namespace.layout, local=local, numerics=numerics)
    for _ in range(_ATTEMPTS if request.read and chosen.limit else 0):
        try:
            match = cache.match(namespace, tokens, chosen)
            if match is None:
                break
            return _read(cache, namespace, request, match, owner)
        except (DamagedError, GoneError):
            continue
        except StorageError as error:
            # What cannot be read now can be computed.
            log.warning("restore_failed", reason=error.message)
            break
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
