"""The end of an export inside a segment: its first rows, as a node of their own.

Where all layers are full, every row is a restore point, and tokens may part inside a
stored segment. An export's path consists of whole nodes, so the rows up to there are
stored once more, beside the segment that they come from; where the namespace's settings
forbid that, the path ends before that segment.
"""

import math
from typing import Final

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import Provenance
from kvport.manifest.layout import BlobClass, StateLayout, row_axis
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import TOKEN_SIZE, prefix_keys
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import Match, Namespace, NewSegment
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.errors import (
    CacheAbsentError,
    CapacityError,
    DiskFullError,
    EngineStoppedError,
    GoneError,
    QuotaError,
    RevokedStateError,
    StorageError,
    TierError,
    WriteBudgetError,
)

_ERRORS: Final[dict[SkipReason, type[KvportError]]] = {
    SkipReason.CAPACITY: CapacityError,
    SkipReason.DISK_FULL: DiskFullError,
    SkipReason.GONE: GoneError,
    SkipReason.CLOSED: EngineStoppedError,
    SkipReason.DEADLINE: EngineStoppedError,
    SkipReason.ABSENT: CacheAbsentError,
    SkipReason.REVOKED: RevokedStateError,
}
_FORBIDDEN: Final[dict[SkipReason, type[KvportError]]] = {
    SkipReason.QUOTA: QuotaError,
    SkipReason.TIER: TierError,
    SkipReason.WRITE_BUDGET: WriteBudgetError,
}
"""By what is set of the namespace; raised if there is no whole node to end with."""


def lease_whole_path(
    cache: Cache,
    namespace: Namespace,
    tokens: bytes,
    match: Match,
    *,
    provenance: Provenance,
    owner: str,
) -> Lease:
    """Lease a path of whole nodes that ends at the match's position.

    Or at the last whole node's end, where nothing may be stored.

    Args:
        cache: where the match is from.
        namespace: likewise.
        tokens: encoded ids that were matched.
        match: what they found; its last node may be used in part.
        provenance: what is true of the last node's rows.
        owner: of the lease.

    Raises:
        GoneError: the path was removed in the meantime.
        DamagedError: the segment to be cut is damaged.
        CapacityError: there is no room for the cut segment.
        DiskFullError: likewise.
        TierError: it may not be stored, and there is no whole node.
        QuotaError: likewise.
        WriteBudgetError: likewise.
        RevokedStateError: its key was revoked in the meantime.
        StorageError: the volume failed.
    """
    last = match.nodes[-1]
    if last.end == match.position:
        return cache.lease(namespace, last.id, owner)
    # The same rows once more: they live no longer than those that there are.
    ttl = cache.ttl(namespace, last.id)
    chain = cache.chain(namespace, last.parent, owner, ttl=ttl)
    try:
        chain.append(_cut(cache, namespace, tokens, match, provenance))
        cache.flush()
        if chain.broken is not None:
            reason = SkipReason(chain.broken)
            if reason not in _FORBIDDEN or last.parent == ROOT_NODE:
                error = (_ERRORS | _FORBIDDEN).get(reason, StorageError)
                raise error("the last rows could not be stored as a segment")
        return cache.lease(namespace, chain.tip, owner)
    finally:
        chain.close()


def first_rows(
    layout: StateLayout, rows: int, blob: memoryview, wanted: int
) -> list[memoryview]:
    """A `kv` blob of the first rows of another, as buffers; no row is copied.

    Args:
        layout: of full layers.
        rows: in the blob.
        blob: its verified bytes.
        wanted: rows to take, fewer.
    """
    old = layout.blob(BlobClass.KV, rows)
    buffers = [memoryview(layout.blob(BlobClass.KV, wanted).header)]
    for tensor in old.tensors:
        axis = row_axis(layout.caches[tensor.cache].leaves[tensor.leaf].shape)
        runs = math.prod(tensor.shape[:axis])
        step = tensor.nbytes // runs
        taken = step // rows * wanted
        starts = range(tensor.offset, tensor.offset + tensor.nbytes, step)
        buffers += (blob[start : start + taken] for start in starts)
    return buffers


def _cut(
    cache: Cache,
    namespace: Namespace,
    tokens: bytes,
    match: Match,
    provenance: Provenance,
) -> NewSegment:
    node, end = match.nodes[-1], match.position
    ref = node.blob(BlobClass.KV)
    if ref is None:
        raise GoneError("the segment to be cut has no rows")
    blob = memoryview(cache.read(namespace, ref))
    identity, block_size = namespace.identity.digest, namespace.block_size
    (key,) = prefix_keys(identity, block_size, tokens, [end])
    return NewSegment(
        start=node.start,
        end=end,
        key=key,
        tokens=tokens[node.start * TOKEN_SIZE : end * TOKEN_SIZE],
        kinds=frozenset(),
        blobs={
            BlobClass.KV: first_rows(
                namespace.layout, node.end - node.start, blob, end - node.start
            )
        },
        provenance=provenance,
    )
