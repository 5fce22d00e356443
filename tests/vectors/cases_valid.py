"""Artifacts that are right."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import CacheKind, CacheLayout, LeafSpec, StateLayout
from kvport.manifest.model import Session
from tests.manifest.builder import (
    DENSE,
    HYBRID,
    KEY,
    NOW,
    OTHER_KEY,
    WINDOWED,
    ManifestBuilder,
)
from tests.manifest.sealed_builder import READER
from tests.vectors.case import Case
from tests.vectors.encoding import ENCODED, encoded, frame_by_library, frame_of
from tests.vectors.large import LARGE
from tests.vectors.making import BASE, BOTH, WIDE, case
from tests.vectors.sealed_making import (
    OTHER_READER,
    SEALED,
    packed,
    recipients,
    sealed_case,
)
from tests.vectors.trust_making import LOST, given, revoking

ODD = StateLayout(
    (
        CacheLayout(
            "0.0",
            CacheKind.QUANTIZED,
            None,
            (
                LeafSpec("k", "U32", (1, -1, 2)),
                LeafSpec("k_scales", "BF16", (1, -1, 1)),
            ),
            bits=4,
            group_size=64,
        ),
        CacheLayout(
            "0.1",
            CacheKind.ARRAYS,
            None,
            (LeafSpec("s0", "F32", (1, 0)), LeafSpec("s2", "BOOL", (1, 3))),
            slots=3,
        ),
        CacheLayout("2", CacheKind.CHUNKED, 4, (LeafSpec("k", "F16", (1, -1, 1)),)),
        CacheLayout(
            "10", CacheKind.ROTATING, 4, (LeafSpec("k", "F16", (1, -1, 1)),), keep=2
        ),
    )
)
"""All kinds, in a list and out, with first rows kept and a leaf without bytes."""


def cases() -> Iterator[Case]:
    def add(name: str, about: str, builder: ManifestBuilder, **given: Any) -> Case:
        return case(
            name,
            None,
            about,
            given.pop("container", None) or builder.container(),
            builder,
            **given,
        )

    points = {10: (PointKind.REPLY,)}
    yield add(
        "full-layers",
        "no points: any row is a restore point",
        ManifestBuilder(layout=DENSE, points={}),
    )
    yield add(
        "windowed-layers",
        "window rows of the last point only",
        ManifestBuilder(layout=WINDOWED, points=points),
    )
    yield add("whole-layers", "a state at each point", ManifestBuilder(layout=HYBRID))
    yield add("all-classes", "three classes of blobs", WIDE)
    yield add(
        "all-kinds",
        "all kinds of caches, names sorted as text",
        ManifestBuilder(layout=ODD),
    )
    yield add(
        "one-token",
        "the shortest prefix",
        ManifestBuilder(
            layout=HYBRID, tokens=(7,), cuts=(), points={1: (PointKind.PROMPT,)}
        ),
    )
    yield add(
        "whole-blocks",
        "the last block is full",
        ManifestBuilder(layout=DENSE, tokens=tuple(range(8)), cuts=(), points={}),
    )
    yield add(
        "high-ids",
        "token ids up to 2^32 - 1",
        attrs.evolve(BASE, tokens=(0, 1, 2**31, 2**32 - 1, 5, 6)),
    )
    yield add("no-session", "of no conversation", attrs.evolve(BASE, session=Session()))
    yield add(
        "unicode-name",
        "names are any printable text",
        attrs.evolve(BASE, name="Mac \u00e4 \u2014 \U0001f5a5"),
    )
    yield add("no-model", "checked without a model", BASE, local=None)
    yield add(
        "last-second",
        "it expires a second later",
        BASE,
        now=BASE.expires - timedelta(seconds=1),
    )
    early = attrs.evolve(BASE, created=NOW + timedelta(seconds=300))
    yield add("clock-skew", "created 300 s ahead of this clock", early)
    mine = attrs.evolve(BASE, audience=(OTHER_KEY.public.key_id,))
    yield add(
        "audience",
        "for this node",
        BASE,
        container=BASE.container(mine.signed()),
        own_key=OTHER_KEY.public.key_id,
    )
    both = BASE.container(BASE.signed(signers=[KEY, OTHER_KEY]))
    yield add(
        "two-signatures", "both signers are trusted", BASE, container=both, trust=BOTH
    )
    limits = BASE.trust(
        scopes=frozenset({"default", "team"}),
        models=frozenset({"tiny"}),
        not_before=NOW,
        not_after=NOW + timedelta(seconds=1),
    )
    yield add("narrow-trust", "trusted for just this", BASE, trust=limits)
    yield add(
        "encoded",
        "a frame of raw and run-length blocks",
        ENCODED,
        container=encoded(frame_of()),
    )
    yield add(
        "encoded-by-zstd",
        "a frame whose blocks need zstd",
        ENCODED,
        container=encoded(frame_by_library()),
    )
    yield add(
        "given-by-a-document", "a trust document lists the signer", BASE, trust=given()
    )
    yield add(
        "others-revoked",
        "a key is revoked that has no part in it",
        BASE,
        trust=revoking(BASE.trust(), LOST),
    )
    sealed = packed(SEALED, SEALED.messages())
    yield sealed_case("sealed", None, "opened by its recipient", sealed)
    yield sealed_case(
        "sealed-unopened", None, "checked from outside", sealed, recipient=None
    )
    two = recipients(READER, OTHER_READER)
    yield sealed_case(
        "sealed-for-two",
        None,
        "opened by the second recipient",
        packed(two, two.messages()),
        two,
        recipient=OTHER_READER,
    )
    yield sealed_case(
        "sealed-chunks",
        None,
        "a message of three chunks",
        packed(LARGE, LARGE.messages()),
        LARGE,
    )
