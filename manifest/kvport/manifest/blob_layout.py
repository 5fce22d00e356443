"""What a blob must be: header bytes, tensors in order, size; derived, never read.

A blob is a safetensors file with the one header that its layer class and row count give
(layout.py): tensors sorted by name, without gaps, no `__metadata__`, padded with spaces
to a multiple of 8 bytes.

An artifact may have thousands of different row counts, and is not trusted with much of
our time: what does not depend on the row count is worked out once (`Leaf`), and tensors
are described when somebody asks.
"""

import math
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import attrs

from kvport.manifest.errors import LimitExceededError, TensorHeaderError
from kvport.manifest.limits import BLOB_BYTES

DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8,
}  # fmt: skip
ROWS: Final = -1
"""The dimension of a leaf's shape that counts rows (tokens)."""


@attrs.frozen
class TensorSpec:
    """One tensor of a blob; `offset` counts from the start of the blob."""

    name: str
    cache: int
    """Index into `StateLayout.caches`."""
    leaf: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@attrs.frozen(slots=False)
class Leaf:
    """One tensor of all blobs of a class.

    Attributes:
        name: of the tensor.
        cache: index of its cache object.
        leaf: its index there.
        dtype: of its values.
        shape: with `ROWS` for the row count.
        window: rows that it has at most; None for any number.
    """

    name: str
    cache: int
    leaf: int
    dtype: str
    shape: tuple[int, ...]
    window: int | None

    def rows(self, rows: int) -> int:
        """Rows that it has in a blob of so many tokens."""
        return rows if self.window is None else min(rows, self.window)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, or of the tensor if it has no rows."""
        others = (dim for dim in self.shape if dim != ROWS)
        return math.prod(others) * DTYPE_BYTES[self.dtype]

    @cached_property
    def has_rows(self) -> bool:
        """Whether its size depends on the row count."""
        return ROWS in self.shape

    @cached_property
    def text(self) -> tuple[str, str]:
        """Its part of the header up to the row count, and from there to the offsets."""
        shape = ",".join("|" if dim == ROWS else str(dim) for dim in self.shape)
        text = f'"{self.name}":{{"dtype":"{self.dtype}","shape":[{shape}]'
        before, _, after = text.partition("|")
        return before, after + ',"data_offsets":['


@attrs.frozen(slots=False)
class BlobLayout:
    """What a blob must be.

    Attributes:
        header: its first bytes.
        size: of the whole blob, in bytes.
    """

    header: bytes
    size: int
    _leaves: Sequence[Leaf] = attrs.field(eq=False, repr=False)
    _rows: int = attrs.field(eq=False, repr=False)

    @classmethod
    def of(cls, leaves: Sequence[Leaf], rows: int) -> "BlobLayout":
        """That of the blob with these tensors, in this order, for so many tokens.

        Raises:
            LimitExceededError: the blob would be larger than the format allows.
        """
        parts: list[str] = []
        start = 0
        for leaf in leaves:
            before, after = leaf.text
            if leaf.has_rows:
                held = leaf.rows(rows)
                end = start + leaf.row_bytes * held
                parts.append(f"{before}{held}{after}{start},{end}]}}")
            else:
                end = start + leaf.row_bytes
                parts.append(f"{before}{after}{start},{end}]}}")
            if end > BLOB_BYTES:
                raise LimitExceededError("a blob of this layout would be too large")
            start = end
        text = ("{" + ",".join(parts) + "}").encode("ascii")
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(header, len(header) + start, leaves, rows)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Its tensors in order."""
        found: list[TensorSpec] = []
        at = len(self.header)
        for leaf in self._leaves:
            held = leaf.rows(self._rows)
            shape = tuple(held if dim == ROWS else dim for dim in leaf.shape)
            nbytes = leaf.row_bytes * (held if leaf.has_rows else 1)
            found.append(
                TensorSpec(
                    name=leaf.name,
                    cache=leaf.cache,
                    leaf=leaf.leaf,
                    dtype=leaf.dtype,
                    shape=shape,
                    offset=at,
                    nbytes=nbytes,
                )
            )
            at += nbytes
        return tuple(found)

    def check_header(self, received: bytes) -> None:
        """Compare the first bytes of a blob with the derived header.

        Raises:
            TensorHeaderError: any difference.
        """
        if received != self.header:
            raise TensorHeaderError("a blob's header is not the derived one")
