"""Means to make vectors: plain artifacts with one thing wrong, all else true."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, blob_digest
from kvport.manifest.identity import PointKind
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.ustar import blob_name
from tests.manifest.builder import ALL, HYBRID, KEY, OTHER_KEY, ManifestBuilder, pack
from tests.vectors.case import Case

BASE = ManifestBuilder(
    layout=HYBRID,
    tokens=tuple(range(100, 106)),
    cuts=(),
    points={6: (PointKind.REPLY,)},
)
"""Two segments of keys and values, and a state at the end."""
WIDE = ManifestBuilder(layout=ALL)
"""All classes of layers, four segments, two points; cut inside of a block."""
BOTH = TrustList.of(
    TrustEntry(public_key=key.public, name=name)
    for key, name in ((KEY, "mac-a"), (OTHER_KEY, "mac-b"))
)

Change = Callable[[dict[str, Any]], None]


def case(
    name: str,
    code: str | None,
    breaks: str,
    container: bytes,
    builder: ManifestBuilder = BASE,
    **given: Any,
) -> Case:
    """A case whose verifier trusts the builder's key and has its model.

    Args:
        name: of the vector.
        code: that refuses it, None if it is valid.
        breaks: what is wrong or, of a valid one, what is particular.
        container: the artifact.
        builder: where the model comes from.
        given: fields of `Case` to be others; `fields` of the mismatch.
    """
    fields = given.pop("fields", ())
    trust = given.pop("trust", builder.trust())
    expect: dict[str, Any] = {"about": breaks} if code is None else {"breaks": breaks}
    if code is not None:
        expect |= {"code": code, "fields": sorted(fields)}
    return Case(
        **{
            "name": name,
            "container": container,
            "trust": trust if isinstance(trust, bytes) else trust.to_json(),
            "local": builder.local(),
            "expect": expect,
            **given,
        }
    )


def payload(change: Change, builder: ManifestBuilder = BASE) -> bytes:
    """The builder's payload after a change."""
    value = copy.deepcopy(builder.payload())
    change(value)
    return canonical_dumps(value)


def edited(change: Change, builder: ManifestBuilder = BASE) -> bytes:
    """A container whose payload was changed, then signed."""
    return builder.container(builder.signed(payload(change, builder)))


def spelled(before: bytes, after: bytes, builder: ManifestBuilder = BASE) -> bytes:
    """A container whose payload's bytes were changed at one place, then signed."""
    data = builder.manifest().encode()
    assert before in data
    return builder.container(builder.signed(data.replace(before, after, 1)))


def unpacked(builder: ManifestBuilder = BASE) -> list[tuple[str, bytes]]:
    """Name and content of the entries."""
    named = {blob_name(digest): blob for digest, blob in builder.blobs().items()}
    named |= {"envelope.json": builder.signed(), "tokens": builder.token_bytes}
    return [(e.name, named[e.name]) for e in builder.verified().entries()]


def with_blobs(
    changes: Mapping[int, Callable[[bytes], bytes]],
    builder: ManifestBuilder = BASE,
    claim: Mapping[str, Any] | None = None,
) -> bytes:
    """A container some of whose blobs have other bytes, whose digests are signed.

    Args:
        changes: by number of the blob in the container.
        builder: whose.
        claim: fields that these blobs have in the manifest.
    """
    value = copy.deepcopy(builder.payload())
    entries = unpacked(builder)
    for index, change in changes.items():
        old = entries[2 + index][1]
        new = change(old)
        entries[2 + index] = blob_name(BlobDigest(blob_digest(new))), new
        for blob in blobs_of(value):
            if blob["digest"] == f"blake3:{blob_digest(old).hex()}":
                blob["digest"] = f"blake3:{blob_digest(new).hex()}"
                blob.update(claim or {})
    entries[0] = "envelope.json", builder.signed(value)
    return pack(entries)


def blobs_of(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The blobs of a manifest's JSON, in the container's order."""
    return [blob for p in (*value["points"], *value["segments"]) for blob in p["blobs"]]
