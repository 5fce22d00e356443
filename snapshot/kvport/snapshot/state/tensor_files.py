"""Safetensors files of strangers: the header, read strictly before anything else.

What other readers let pass is refused: tensors that overlap or leave gaps, bytes after
the last one, keys that occur twice, fields that nobody knows. So there is one way to
read a file, and its tensors need no more memory than the file has bytes.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, Self

import attrs

from kvport.manifest.blob_layout import DTYPE_BYTES
from kvport.manifest.canonical import unambiguous_loads
from kvport.manifest.errors import FormatError
from kvport.manifest.limits import MIB
from kvport.snapshot.errors import PromptCacheError

_HEADER_BYTES: Final = 2 * MIB
_METADATA: Final = "__metadata__"
_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,4})(\.(0|[1-9][0-9]{0,4})){0,15}", re.ASCII)
_RANK: Final = 8


@attrs.frozen
class Tensor:
    """One tensor; `start` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@attrs.frozen
class TensorFile:
    """An open file whose header was checked.

    Attributes:
        tensors: by name; names are indexes joined by dots.
        metadata: as it stands.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    _file: BinaryIO

    @classmethod
    def of(cls, file: BinaryIO) -> Self:
        """Check the header of a file that can be sought in.

        Raises:
            PromptCacheError: it is not a safetensors file, cut short, or has more than
                one reading.
            OSError: it cannot be read.
        """
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == len(b"<u64 LE>") else 0
        if not 1 < length <= min(_HEADER_BYTES, size - len(head)):
            raise PromptCacheError("the file is not safetensors, or is cut short")
        header = _parsed(file.read(length))
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise PromptCacheError("the file's metadata are not texts")
        base = len(head) + length
        tensors = {name: _tensor(name, found, base) for name, found in header.items()}
        at = base
        for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
            if tensor.start != at:
                raise PromptCacheError("the file's tensors overlap or leave gaps")
            at += tensor.nbytes
        if at != size:
            raise PromptCacheError("the file does not end with its last tensor")
        return cls(tensors, metadata, file)

    def read(self, tensor: Tensor) -> bytes:
        """A tensor's bytes, little-endian in row-major order.

        Raises:
            PromptCacheError: the file has become shorter.
            OSError: it cannot be read.
        """
        self._file.seek(tensor.start)
        data = self._file.read(tensor.nbytes)
        if len(data) != tensor.nbytes:
            raise PromptCacheError("the file was cut short while it was read")
        return data


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = unambiguous_loads(data)
    except FormatError as error:
        raise PromptCacheError("the file's header is not its one JSON form") from error
    if not isinstance(value, dict):
        raise PromptCacheError("the file's header is not an object")
    return value


def _tensor(name: str, found: object, base: int) -> Tensor:
    match found:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(start), int(end)],
            **rest,
        } if not rest and _NAME.fullmatch(name) and dtype in DTYPE_BYTES:
            numbers = [start, end, *shape]
            if len(shape) <= _RANK and all(type(n) is int and n >= 0 for n in numbers):
                nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
                if end - start == nbytes:
                    return Tensor(dtype, tuple(shape), base + start, nbytes)
    raise PromptCacheError("a tensor of the file has an unknown form")
