"""What the shim has logged: operations with their data, and notes in between."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import attrs

_HEAD = struct.Struct("=IIQQqIIQ")
_MAGIC = 0x53544550


class Op(IntEnum):
    """Numbers of shim.c."""

    OPEN = 0
    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    FSYNC = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    RMDIR = 8
    MKDIR = 9
    CHMOD = 10
    NOTE = 11


@attrs.frozen
class Record:
    """One call that succeeded, or a note.

    Attributes:
        op: which call.
        step: its number; of the last step before, if it is a note.
        inode: of the file or directory that was made, written or flushed.
        offset: of a write; the new size, if it is a truncation.
        path: absolute.
        other: the new name, of a rename or link.
        data: what was written, or the note.
    """

    op: Op
    step: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes = attrs.field(repr=False)


def read_log(path: Path) -> Iterator[Record]:
    """Records in order; the last may be cut, where the process was killed."""
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + _HEAD.size <= len(data):
        magic, op, step, inode, offset, *sizes = _HEAD.unpack_from(data, at)
        assert magic == _MAGIC
        at += _HEAD.size
        if at + sum(sizes) > len(data):
            return
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        name, other = parts[0].decode(), parts[1].decode()
        yield Record(Op(op), step, inode, offset, name, other, parts[2])
