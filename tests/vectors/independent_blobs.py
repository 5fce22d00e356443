"""Blobs by their layout, and frames, for the independent verifier.

Written from docs/format.md, section 7. Of frames raw and run-length blocks are decoded;
others, which the standard library has no decoder for, are looked at from outside.
"""

import json
import struct
from typing import Any

from tests.vectors.independent_fields import (
    CLASS_OF_BLOB,
    GIB,
    MIB,
    WIDTH,
    digest,
    need,
)


def blob_form(caches: Any, blob_class: str, rows: int) -> tuple[bytes, list[Any]]:
    """The header, and size and width of each tensor."""
    tensors = {}
    for each in caches:
        if each["class"] == CLASS_OF_BLOB[blob_class]:
            held = min(rows, each.get("window", rows))
            for leaf in each["leaves"]:
                shape = [held if d == -1 else d for d in leaf["shape"]]
                if 0 not in shape:
                    tensors[f"{each['cache']}.{leaf['name']}"] = leaf["dtype"], shape
    need(
        blob_class
        in {b for b, c in CLASS_OF_BLOB.items() for e in caches if e["class"] == c},
        "arithmetic",
    )
    header, sizes, at = {}, [], 0
    for label in sorted(tensors):
        dtype, shape = tensors[label]
        size = WIDTH[dtype]
        for dim in shape:
            size *= dim
        offsets = [at, at + size]
        header[label] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        sizes.append((size, WIDTH[dtype]))
        at += size
        need(at <= GIB, "limit_exceeded")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, sizes


def decode(frame: bytes, header: bytes, sizes: list[Any]) -> bytes | None:
    """The plain blob; None if a block needs a decoder of zstd."""
    size = len(header) + sum(each for each, _ in sizes)
    single = size <= MIB
    form, flag = ("<B", 0) if size < 256 else ("<H", 1) if size < 65792 else ("<I", 2)
    head = b"\x28\xb5\x2f\xfd" + bytes([flag << 6 | single << 5])
    head += b"" if single else b"\x50"
    head += struct.pack(form, size - 256 * (flag == 1))
    need(frame.startswith(head), "blob_encoding")
    at, plain, last, known = len(head), b"", False, True
    while not last:
        need(at + 3 <= len(frame), "blob_encoding")
        fields = int.from_bytes(frame[at : at + 3], "little")
        last, kind, count = bool(fields & 1), fields >> 1 & 3, fields >> 3
        need(kind != 3 and count <= 1 << 17, "blob_encoding")
        stored = 1 if kind == 1 else count
        content = frame[at + 3 : at + 3 + stored]
        need(len(content) == stored and (count or last), "blob_encoding")
        plain += content * count if kind == 1 else content
        known, at = known and kind != 2, at + 3 + stored
    need(at == len(frame), "blob_encoding")
    if not known:
        return None
    need(len(plain) == size, "blob_encoding")
    out, at = b"", 0
    for part, width in [(len(header), 1), *sizes]:
        for start in range(0, part, MIB):
            piece = plain[at : at + min(MIB, part - start)]
            at += len(piece)
            count = len(piece) // width
            out += bytes(
                piece[b * count + v] for v in range(count) for b in range(width)
            )
    return out


def check_blob(form: tuple[Any, bytes, list[Any]], data: bytes) -> None:
    """Step 12, once it is opened."""
    blob, header, sizes = form
    plain = decode(data, header, sizes) if blob["codec"] == "shuffle-zstd" else data
    if plain is not None:
        need(plain.startswith(header), "tensor_header")
        need(digest(plain) == blob["digest"], "digest_mismatch")
