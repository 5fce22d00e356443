"""Lookup and restore: from token ids to a model's caches.

A `Restorer` runs in a worker thread, so that running replies go on: it looks the
longest allowed restore point up, leases its path, and reads the blobs, each checked
against its digest, into host buffers. Damage found on the way is a miss: the damaged
path is gone when the lookup is made again. The end of a reply that still waits in
memory is a restore point like any other. The engine's thread turns the buffers into
caches.
"""

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import structlog

from kvport.manifest.identity import KeyId, Numerics
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.cache import Cache, Chain
from kvport.snapshot.cache.records import (
    ExactRule,
    Match,
    Namespace,
    NodeRecord,
    Selection,
)
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.requests import Policy, Request
from kvport.snapshot.engine.tails import Tail
from kvport.snapshot.engine.taken import Base, Taken, base_of
from kvport.snapshot.errors import DamagedError, GoneError, StorageError
from kvport.snapshot.state.blobs import Assembly

log = structlog.get_logger(__name__)

_ATTEMPTS: Final = 64
"""Each failed attempt removes what it failed on: never reached in earnest."""


@attrs.frozen(kw_only=True)
class Prepared:
    """What was found for a request.

    Attributes:
        restored: tokens that are restored.
        base: what is computed next is computed on top of this.
        assembly: their state; None if there is none.
        chain: where capture goes on; it holds the lease on the restored path. None if
            nothing is to be stored.
        waiting: segments between the chain's tip and `restored`, not stored yet.
    """

    restored: int
    base: Base
    assembly: Assembly | None
    chain: Chain | None
    waiting: tuple[Taken, ...] = ()


NOTHING: Final = Prepared(
    restored=0,
    base=Base(end=0, cold=True, origins=frozenset()),
    assembly=None,
    chain=None,
)
"""Of a model that runs without the cache, or while there is none."""


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


@attrs.frozen(kw_only=True)
class Restorer:
    """Finds and reads the state that one request restores; in a worker thread.

    Attributes:
        cache: where state is stored.
        suspect: called when its volume fails.
        namespace: the model's.
        request: what is asked.
        owner: of the leases that are taken.
        local: this node's key.
        numerics: this machine's.
        retention: what is kept of the path once the request has ended.
        tail: a reply's end in memory that the prompt begins with, if there is one.
    """

    cache: Cache
    suspect: Callable[[], None]
    namespace: Namespace
    request: Request
    owner: str
    local: KeyId
    numerics: Numerics
    retention: Retention
    tail: Tail | None

    def prepare(self) -> Prepared:
        """Find and read it; at least one token is left to evaluate."""
        tokens = encode_tokens(self.request.tokens)
        layout = self.namespace.layout
        chosen = selection(
            self.request, layout, local=self.local, numerics=self.numerics
        )
        tail = self.tail
        for _ in range(_ATTEMPTS if self.request.read and chosen.limit else 0):
            try:
                match = self.cache.match(self.namespace, tokens, chosen)
                if tail is not None and (not match or match.position < tail.position):
                    used, tail = tail, None
                    return self._from_tail(used)
                if match is None:
                    break
                return self._from_match(match)
            except (DamagedError, GoneError):
                continue
            except StorageError as error:
                # What cannot be read now can be computed.
                log.warning("restore_failed", reason=error.message)
                self.suspect()
                break
        base = base_of(None, local=self.local, numerics=self.numerics)
        try:
            chain = self._chain(ROOT_NODE)
        except (GoneError, StorageError) as error:
            # Nor is what is computed stored; the reply does not wait for a volume.
            log.warning("capture_impossible", reason=error.message)
            self.suspect()
            chain = None
        return Prepared(restored=0, base=base, assembly=None, chain=chain)

    def _from_match(self, match: Match) -> Prepared:
        tip = match.nodes[-1].id
        with self.cache.lease(self.namespace, tip, self.owner) as lease:
            assembly = assemble(self.cache, self.namespace, match.nodes, match.position)
            lease.check()
            return Prepared(
                restored=match.position,
                base=base_of(match, local=self.local, numerics=self.numerics),
                assembly=assembly,
                chain=self._chain(match.tip),
            )

    def _from_tail(self, tail: Tail) -> Prepared:
        """The stored path up to the tail, and the tail's rows and state from memory.

        Raises:
            GoneError: its chain is broken, it has expired, or the path was removed.
        """
        if not tail.chain.is_current:
            raise GoneError("a reply's end has expired in memory")
        if tail.chain.broken is not None:
            raise GoneError("the rows before a reply's end were not stored")
        tip, layout = tail.chain.tip, self.namespace.layout
        with self.cache.lease(self.namespace, tip, self.owner) as lease:
            path = self.cache.path(self.namespace, tip)
            assembly = assemble(self.cache, self.namespace, path, tail.position)
            for taken in tail.taken:
                for blob_class, buffers in taken.blobs(layout).items():
                    if assembly.wants(blob_class, taken.start, taken.end):
                        blob = memoryview(b"".join(buffers))
                        assembly.add(blob_class, taken.start, taken.end, blob)
            if not assembly.complete:
                raise GoneError("rows before a reply's end were pruned")
            lease.check()
            tail.chain.use()
            return Prepared(
                restored=tail.position,
                base=Base(end=tail.position, cold=False, origins=tail.origins),
                assembly=assembly,
                chain=self._chain(tip),
                waiting=tail.taken,
            )

    def _chain(self, tip: NodeId) -> Chain | None:
        if not self.request.write:
            return None
        return self.cache.chain(
            self.namespace,
            tip,
            self.owner,
            self.retention,
            ttl=self.request.ttl,
            pin=self.request.pin,
        )


def assemble(
    cache: Cache, namespace: Namespace, nodes: Sequence[NodeRecord], position: int
) -> Assembly:
    """Read the blobs of a leased path into the state at a position.

    Args:
        cache: where the path is.
        namespace: likewise.
        nodes: the path, root first.
        position: tokens to restore; the path may end before it.

    Raises:
        DamagedError: a blob is not what was stored.
        GoneError: it was removed.
        StorageError: it could not be read.
    """
    assembly = Assembly(namespace.layout, position)
    for node in nodes:
        for ref in node.blobs:
            if assembly.wants(ref.blob_class, node.start, node.end):
                data = memoryview(cache.read(namespace, ref))
                assembly.add(ref.blob_class, node.start, node.end, data)
    return assembly
