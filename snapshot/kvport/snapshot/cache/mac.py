"""The MAC of index rows: what was written by other hands is not taken for ours.

In: a key from the home, and what a node's rows say. Out: 16 bytes that nobody makes
without the key. It guards a cache on a volume that others write to, not against
programs of the same user, which can read the key. Without a key (None) a public one is
used, so that only accidents are found.

A node's MAC covers its namespace, its name and its parent's, its range, key and kinds,
the blobs that it has now, and all that is attested. All parts are of fixed width or
follow their lengths.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import attrs
from blake3 import blake3

MAC_SIZE: Final = 16
KEY_SIZE: Final = 32

BlobRow: TypeAlias = tuple[int, bytes, int, int]
"""Number of the class, digest, size, bytes of the trailer."""

_HEAD: Final = struct.Struct("<HHHHQQQHH")
_BLOB: Final = struct.Struct("<HHQQ")
_TEXT: Final = struct.Struct("<I")
_NUMBERS: Final = struct.Struct("<QQ")
_ROOT: Final = b"root"
_CLAIM: Final = b"claim"
_NODE: Final = b"node"
_NAMESPACE: Final = b"namespace"


@attrs.frozen
class NamespaceRow:
    """A row of the table `ns` in its columns' order, without its number and its MAC."""

    id: str
    identity: str
    scope: str
    block_size: int
    model: str
    source: str
    loaded: int


class RowMac:
    """MACs of one root's rows."""

    def __init__(self, key: bytes | None, root_id: str) -> None:
        """Of a root, so that rows of another root of this home do not fit.

        Raises:
            ValueError: the key has not `KEY_SIZE` bytes.
        """
        home = bytes(KEY_SIZE) if key is None else key
        self._key: Final = blake3(_ROOT + root_id.encode(), key=home).digest()

    def root(self) -> bytes:
        """Says that an index was made with this key, for this root."""
        return blake3(_ROOT, key=self._key).digest(MAC_SIZE)

    def claim(self, lineage: str, numerics: str, origins: str) -> bytes:
        """32 bytes that stand for a statement in a node's MAC."""
        data = _texts(lineage, numerics, origins)
        return blake3(_CLAIM + data, key=self._key).digest()

    def namespace(self, row: NamespaceRow) -> bytes:
        """The MAC of a namespace; it covers all columns.

        Raises:
            TypeError: a value is of another type than its column; planted ones may be.
            AttributeError: likewise.
            struct.error: likewise, or out of range.
        """
        numbers = _NUMBERS.pack(row.block_size, row.loaded)
        texts = _texts(row.id, row.identity, row.scope, row.model, row.source)
        data = _NAMESPACE + numbers + texts
        return blake3(data, key=self._key).digest(MAC_SIZE)

    def node(
        self,
        names: tuple[bytes, bytes, bytes, bytes],
        numbers: tuple[int, int, int],
        blobs: Sequence[BlobRow],
        claims: Iterable[bytes],
    ) -> bytes:
        """The MAC of a node.

        Args:
            names: its namespace's id, its own, its parent's, and its key.
            numbers: start, end, bits of its kinds.
            blobs: by ascending class.
            claims: as of `claim`.

        Raises:
            TypeError: a value is of another type than its column; planted ones may be.
            struct.error: likewise, or out of range.
        """
        stated = sorted(claims)
        head = _HEAD.pack(*map(len, names), *numbers, len(blobs), len(stated))
        data = [_NODE, head, *names]
        for number, digest, size, trailer in blobs:
            data += (_BLOB.pack(number, len(digest), size, trailer), digest)
        return blake3(b"".join((*data, *stated)), key=self._key).digest(MAC_SIZE)


def _texts(*texts: str) -> bytes:
    parts = (text.encode() for text in texts)
    return b"".join(_TEXT.pack(len(part)) + part for part in parts)
