"""NodeId: the name of one stored path of segments, in one variant.

    NodeId = KDF(node, parent id || key(end) || for kv, window, state in this order:
                 byte 1 and the blob's digest if there is such a blob, else byte 0)

The same tokens may be stored in several variants (computed here, elsewhere, by decode):
each is a path of its own, and equal bytes under the same parent are one node.
"""

from collections.abc import Mapping
from typing import Final, NewType

from kvport.manifest.digests import DIGEST_SIZE, BlobDigest, Key, derive
from kvport.manifest.domains import Domain
from kvport.manifest.layout import BlobClass

NodeId = NewType("NodeId", bytes)
"""32 bytes; see the module."""

ROOT_NODE: Final = NodeId(bytes(DIGEST_SIZE))
"""Parent of the segments that start at token 0."""


def node_id(
    parent: NodeId, key: Key, digests: Mapping[BlobClass, BlobDigest]
) -> NodeId:
    """Name the segment that ends at key(end), under its parent, with these blobs."""
    parts = [parent, key]
    for blob_class in BlobClass:
        digest = digests.get(blob_class)
        parts.append(b"\x00" if digest is None else b"\x01" + digest)
    return NodeId(derive(Domain.NODE, b"".join(parts)))
