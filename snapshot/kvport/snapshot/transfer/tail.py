"""The end of an export inside a segment: its first rows, as a node of their own.

Where all layers are full, every row is a restore point, and tokens may part inside a
stored segment. An export's path consists of whole nodes, so the rows up to there are
stored once more, beside the segment that they come from.
"""

import math
from collections.abc import Mapping
from typing import Final

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import Provenance
from kvport.manifest.layout import BlobClass, StateLayout, row_axis
from kvport.manifest.tokens import TOKEN_SIZE, prefix_keys
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import Match, Namespace, NewSegment
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.errors import (
    CapacityError,
    DiskFullError,
    EngineStoppedError,
    GoneError,
    StorageError,
)

_ERRORS: Final[Mapping[SkipReason, type[KvportError]]] = {
    SkipReason.CAPACITY: CapacityError,
    SkipReason.DISK_FULL: DiskFullError,
    SkipReason.GONE: GoneError,
    SkipReason.CLOSED: EngineStoppedError,
}


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
        StorageError: the volume failed.
    """
    last = match.nodes[-1]
    if last.end == match.position:
        return cache.lease(namespace, last.id, owner)
    chain = cache.chain(namespace, last.parent, owner)
    try:
        chain.append(_cut(cache, namespace, tokens, match, provenance))
        cache.flush()
        if chain.broken is not None:
            error = _ERRORS.get(SkipReason(chain.broken), StorageError)
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
