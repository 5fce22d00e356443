"""What must add up, and bytes that are not what was signed."""

from collections.abc import Iterator
from typing import Any

import attrs

from kvport.manifest.digests import blob_digest
from kvport.manifest.tokens import encode_tokens
from tests.manifest.builder import ManifestBuilder, pack
from tests.vectors.case import Case
from tests.vectors.encoding import ENCODED, encoded, frame_of
from tests.vectors.making import (
    BASE,
    WIDE,
    Change,
    case,
    edited,
    unpacked,
    with_blobs,
)


def cases() -> Iterator[Case]:
    yield from _arithmetic()
    yield from _parts()
    yield from _tokens()
    yield from _blobs()
    yield from _frames()


def _sums(
    name: str, breaks: str, change: Change, builder: ManifestBuilder = WIDE
) -> Case:
    data = edited(change, builder)
    return case(f"sums-{name}", "arithmetic", breaks, data, builder)


def _arithmetic() -> Iterator[Case]:
    add = _sums

    def last(value: Any) -> None:
        value["segments"][-1]["key"] = value["prefix"]["key"] = "00" * 32
        value["prefix"]["key"] = "11" * 32

    def provenance(value: Any) -> None:
        value["points"][0]["lineage"] = "cold"

    def swap(value: Any) -> None:
        value["segments"][0], value["segments"][1] = (
            value["segments"][1],
            value["segments"][0],
        )

    def short(value: Any) -> None:
        value["segments"].pop()
        value["points"].pop()

    def beyond(value: Any) -> None:
        value["prefix"].update(tokens=9, size=36)

    def overlap(value: Any) -> None:
        value["segments"][2]["start"] = 5

    def across(value: Any) -> None:
        value["segments"][0]["end"] = value["segments"][1]["start"] = 5

    yield add(
        "gap", "segments are contiguous", lambda v: v["segments"][1].update(start=5)
    )
    yield add("overlap", "segments are contiguous", overlap)
    yield add("order", "segments ascend", swap)
    yield add("not-from-0", "segments begin at 0", lambda v: v["segments"].pop(0))
    yield add("across-a-block", "segments end at blocks", across)
    yield add("too-short", "segments end where the prefix does", short)
    yield add("beyond", "segments end where the prefix does", beyond)
    yield add("last-key", "the last key is the prefix's", last)
    yield add(
        "token-size", "an id has four bytes", lambda v: v["prefix"].update(size=41)
    )
    yield add(
        "no-tokens",
        "a prefix has a token",
        lambda v: v["prefix"].update(tokens=0, size=0),
    )
    yield add(
        "point-inside",
        "points are ends of segments",
        lambda v: v["points"][0].update(position=5),
    )
    yield add("points-swapped", "points ascend", lambda v: v["points"].reverse())
    yield add(
        "point-twice", "points ascend", lambda v: v["points"].insert(0, v["points"][0])
    )
    yield add("point-provenance", "a point says what its segment says", provenance)


def _parts() -> Iterator[Case]:
    add = _sums

    def claims(value: Any) -> None:
        # Rows [4, 6) and [6, 8) in one blob, the state of 10 in that of rows.
        value["points"][1]["blobs"][0]["digest"] = value["segments"][0]["blobs"][0][
            "digest"
        ]

    def encodings(value: Any) -> None:
        first, second = (value["segments"][n]["blobs"][0] for n in (1, 2))
        second.update(first, codec="shuffle-zstd", encoded_size=first["size"] - 1)

    yield add(
        "no-state", "a point has its state", lambda v: v["points"][0].update(blobs=[])
    )
    yield add(
        "rows-at-a-point",
        "a point has nothing else",
        lambda v: v["points"][0]["blobs"].append(v["segments"][0]["blobs"][0]),
    )
    yield add(
        "no-rows", "a segment has its rows", lambda v: v["segments"][0]["blobs"].pop(0)
    )
    yield add(
        "no-window",
        "points need window rows",
        lambda v: v["segments"][1]["blobs"].pop(),
    )
    yield add(
        "classes-swapped",
        "kv is before window",
        lambda v: v["segments"][1]["blobs"].reverse(),
    )
    unneeded = attrs.evolve(WIDE, points={10: WIDE.points[10]})
    window = WIDE.payload()["segments"][1]["blobs"][1]
    yield add(
        "unneeded-window",
        "rows that no point needs are not there",
        lambda v: v["segments"][1]["blobs"].append(window),
        unneeded,
    )
    yield add(
        "no-restore-point", "a prefix ends in a point", lambda v: v["points"].pop()
    )
    yield add(
        "blob-size",
        "sizes follow from the layout",
        lambda v: v["segments"][0]["blobs"][0].update(size=321, encoded_size=321),
    )
    yield add(
        "encoded-size",
        "what is not encoded has its size",
        lambda v: v["segments"][0]["blobs"][0].update(encoded_size=1),
    )
    yield add(
        "encoding-that-grows",
        "an encoding is smaller",
        lambda v: v["segments"][0]["blobs"][0].update(codec="shuffle-zstd"),
    )
    yield add(
        "encoding-of-nothing",
        "an encoding has bytes",
        lambda v: v["segments"][0]["blobs"][0].update(
            codec="shuffle-zstd", encoded_size=0
        ),
    )
    yield add(
        "encoding-of-a-bomb",
        "an encoding is at least a 128th",
        lambda v: v["segments"][0]["blobs"][0].update(
            codec="shuffle-zstd", encoded_size=1
        ),
    )
    yield add("two-encodings", "one blob has one encoding", encodings)
    yield add("two-layouts", "one blob has one layout", claims)


def _tokens() -> Iterator[Case]:
    def add(name: str, breaks: str, data: bytes) -> Case:
        return case(f"tokens-{name}", "token_mismatch", breaks, data)

    entries = unpacked()

    def with_tokens(ids: tuple[int, ...]) -> bytes:
        return pack([entries[0], ("tokens", encode_tokens(ids)), *entries[2:]])

    def signed(ids: tuple[int, ...]) -> bytes:
        data = encode_tokens(ids)
        digest = f"blake3:{blob_digest(data).hex()}"
        value = BASE.payload()
        value["prefix"]["digest"] = digest
        return pack(
            [("envelope.json", BASE.signed(value)), ("tokens", data), *entries[2:]]
        )

    ids = BASE.tokens
    yield add("one-other", "ids have the signed digest", with_tokens((*ids[:-1], 999)))
    yield add(
        "two-swapped",
        "ids have the signed digest",
        with_tokens((ids[1], ids[0], *ids[2:])),
    )
    yield add("signed-one-other", "keys are those of the ids", signed((*ids[:-1], 999)))
    yield add("signed-shifted", "keys are those of the ids", signed((*ids[1:], 999)))

    def key(value: Any) -> None:
        value["segments"][0]["key"] = "00" * 32

    yield add("signed-other-key", "keys are those of the ids", edited(key))

    def identity(value: Any) -> None:
        value["identity"]["quant"] = {"bits": 4}

    other = edited(identity)
    yield case(
        "tokens-keys-of-another-identity",
        "token_mismatch",
        "keys are of the identity",
        other,
        local=None,
    )
    blocks = edited(lambda v: v.update(block_size=8))
    yield case(
        "tokens-keys-of-another-block-size",
        "token_mismatch",
        "keys are of the block size",
        blocks,
        local=None,
    )


def _blobs() -> Iterator[Case]:
    entries = unpacked()

    def add(name: str, code: str, breaks: str, data: bytes) -> Case:
        return case(f"blob-{name}", code, breaks, data)

    def changed(index: int, data: bytes) -> bytes:
        name = entries[2 + index][0]
        return pack([*entries[: 2 + index], (name, data), *entries[3 + index :]])

    state = entries[2][1]
    flipped = state[:-1] + bytes([state[-1] ^ 1])
    yield add(
        "flipped-bit",
        "digest_mismatch",
        "blobs have the signed digest",
        changed(0, flipped),
    )
    wide = unpacked(WIDE)
    names, data = [n for n, _ in wide], [d for _, d in wide]
    sizes = [len(d) for d in data]
    first = next(n for n in range(4, len(wide)) if sizes[n] in sizes[n + 1 :])
    second = sizes.index(sizes[first], first + 1)
    data[first], data[second] = data[second], data[first]
    swapped = pack(list(zip(names, data, strict=True)))
    yield case(
        "blob-swapped",
        "digest_mismatch",
        "blobs stand under their names",
        swapped,
        WIDE,
    )

    def header(old: bytes, new: bytes, name: str, breaks: str, index: int = 1) -> Case:
        assert len(old) == len(new)

        def change(blob: bytes) -> bytes:
            assert old in blob
            return blob.replace(old, new, 1)

        return add(
            f"header-{name}", "tensor_header", breaks, with_blobs({index: change})
        )

    yield header(b'"0.v"', b'"0.k"', "name-twice", "names are the layout's")
    yield header(b'"0.v"', b'"../"', "path", "names are the layout's")
    yield header(b"[48,96]", b"[00,48]", "overlap", "tensors do not overlap")
    yield header(b"[48,96]", b"[49,97]", "hole", "tensors have no gaps")
    yield header(b'"F16"', b'"I16"', "dtype", "dtypes are the layout's")
    yield header(b"[1,2,4,3]", b"[1,4,2,3]", "shape", "shapes are the layout's")
    yield header(b"{", b" ", "leading-space", "there is no white space before")
    yield header(b'"shape"', b'"shapf"', "unknown-field", "a header is derived")
    meta = b'{"__metadata__":{},'

    def metadata(blob: bytes) -> bytes:
        return blob[:8] + meta + blob[8 + len(meta) :]

    yield add(
        "header-metadata",
        "tensor_header",
        "there is no metadata",
        with_blobs({1: metadata}),
    )

    def length(blob: bytes) -> bytes:
        return bytes([blob[0] + 8]) + blob[1:]

    yield add(
        "header-length",
        "tensor_header",
        "the header's length is derived",
        with_blobs({1: length}),
    )


def _frames() -> Iterator[Case]:
    def add(name: str, breaks: str, frame: bytes) -> Case:
        data = encoded(frame)
        return case(f"frame-{name}", "blob_encoding", breaks, data, ENCODED)

    good = frame_of()
    yield add(
        "checksum",
        "frames have no checksum",
        good[:4] + bytes([good[4] | 4]) + good[5:],
    )
    yield add(
        "content-size",
        "a frame has the blob's size",
        good[:5] + bytes([good[5] ^ 1]) + good[6:],
    )
    yield add("magic", "a frame is one of zstd", b"\x27" + good[1:])
    yield add("cut", "a frame is complete", good[:-1])
    yield add("bytes-after", "nothing follows a frame", good + b"\0")
    yield add("too-short", "a frame holds the blob", frame_of(drop=8))
    yield add("too-long", "a frame holds the blob only", frame_of(more=8))
    yield add("not-last", "the last block says so", frame_of(last=False))
    yield add("reserved-block", "types of blocks are known", frame_of(kind=3))
    yield add(
        "skippable", "a frame is no skippable one", b"\x50\x2a\x4d\x18" + good[4:]
    )
    flipped = frame_of(value=1)
    yield case(
        "frame-of-another-blob",
        "digest_mismatch",
        "blobs have the signed digest",
        encoded(flipped),
        ENCODED,
    )
