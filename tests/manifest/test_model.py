import copy

import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.errors import (
    FormatError,
    LimitExceededError,
    UnsupportedVersionError,
)
from kvport.manifest.identity import Lineage, Numerics, Provenance, StateIdentity
from kvport.manifest.limits import POINTS, SEGMENTS, TOKENS
from kvport.manifest.model import Manifest, Session
from tests.manifest.builder import (
    ALL,
    DENSE,
    HYBRID,
    NUMERICS,
    OTHER_KEY,
    WINDOWED,
    ManifestBuilder,
    identity_of,
)

PAYLOAD = ManifestBuilder().payload()
DIGEST = "blake3:" + "0" * 64


def paths(value, prefix=()):
    """The way to every value in a JSON document."""
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, item in items:
        yield (*prefix, name)
        yield from paths(item, (*prefix, name))


def value_at(document, path):
    for name in path:
        document = document[name]
    return document


def with_value(path, value):
    document = copy.deepcopy(PAYLOAD)
    value_at(document, path[:-1])[path[-1]] = value
    return document


PATHS = list(paths(PAYLOAD))
FIELDS = [path for path in PATHS if isinstance(path[-1], str)]
OBJECTS = [
    path
    for path in PATHS
    if isinstance(value_at(PAYLOAD, path), dict) and path[-1] != "quant"
]
INTEGERS = [path for path in PATHS if type(value_at(PAYLOAD, path)) is int]


@pytest.mark.parametrize("layout", [DENSE, WINDOWED, HYBRID, ALL])
def test_a_manifest_survives_its_bytes(layout):
    manifest = ManifestBuilder(layout=layout).manifest()
    data = manifest.encode()
    again = Manifest.from_json(strict_loads(data))
    assert again == manifest
    assert again.encode() == data


def test_the_fields_are_those_of_the_format():
    assert sorted(PAYLOAD) == [
        "artifact_kind", "audience", "block_size", "created", "expires", "format",
        "format_version", "identity", "info", "issuer", "nonce", "numerics", "origins",
        "points", "prefix", "scope", "segments", "session", "tokenizer",
    ]  # fmt: skip
    assert sorted(PAYLOAD["segments"][0]) == [
        "blobs", "end", "key", "lineage", "numerics", "origins", "start",
    ]  # fmt: skip
    assert sorted(PAYLOAD["points"][0]) == [
        "blobs", "kinds", "lineage", "numerics", "origins", "position",
    ]  # fmt: skip
    assert sorted(PAYLOAD["points"][0]["blobs"][0]) == [
        "class", "codec", "digest", "encoded_size", "size",
    ]  # fmt: skip
    assert sorted(PAYLOAD["prefix"]) == ["digest", "key", "size", "tokens"]


def test_tables_name_each_numerics_and_origin_once():
    builder = ManifestBuilder()
    manifest = builder.manifest()
    other = Provenance(
        Lineage.DERIVED,
        attrs.evolve(NUMERICS, chunk=256),
        frozenset({builder.key.public.key_id, OTHER_KEY.public.key_id}),
    )
    first, *rest = manifest.segments
    changed = attrs.evolve(
        manifest, segments=(attrs.evolve(first, provenance=other), *rest)
    )
    payload = changed.to_json()
    assert payload["numerics"] == [other.numerics.to_json(), NUMERICS.to_json()]
    assert payload["origins"] == sorted(other.origins)
    assert payload["segments"][0]["origins"] == [0, 1]
    assert Manifest.from_json(payload) == changed


@pytest.mark.parametrize("path", [(), *OBJECTS], ids=str)
def test_an_unknown_field_is_refused(path):
    document = copy.deepcopy(PAYLOAD)
    value_at(document, path)["extra"] = 1
    with pytest.raises(FormatError):
        Manifest.from_json(document)


@pytest.mark.parametrize("path", FIELDS, ids=str)
def test_a_missing_field_is_refused(path):
    document = copy.deepcopy(PAYLOAD)
    del value_at(document, path[:-1])[path[-1]]
    with pytest.raises(FormatError):
        Manifest.from_json(document)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_value_of_another_type_is_refused(path):
    for value in (None, 0.5, [0.5]):
        with pytest.raises(FormatError):
            Manifest.from_json(with_value(path, value))


@pytest.mark.parametrize("path", INTEGERS, ids=str)
def test_what_looks_like_an_integer_is_none(path):
    for value in (True, "1"):
        with pytest.raises(FormatError):
            Manifest.from_json(with_value(path, value))


@pytest.mark.parametrize("value", [None, [], [PAYLOAD], "", 1])
def test_a_manifest_is_an_object(value):
    with pytest.raises(FormatError):
        Manifest.from_json(value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"),
        (("nonce",), "0" * 31),
        (("nonce",), "A" * 32),
        (("scope",), ""),
        (("scope",), "a/b"),
        (("scope",), "a" * 65),
        (("created",), "2026-03-01T12:00:00+00:00"),
        (("expires",), "never"),
        (("tokenizer",), "sha256:" + "0" * 64),
        (("tokenizer",), "blake3:" + "A" * 64),
        (("block_size",), 0),
        (("audience",), ["mac-b"]),
        (("audience",), ["ed25519:" + "1" * 64, "ed25519:" + "0" * 64]),
        (("audience",), ["ed25519:" + "0" * 64] * 2),
        (("issuer", "key_id"), "mac-a"),
        (("issuer", "name"), "\x1b[31m"),
        (("info", "host"), "a\nb"),
        (("info", "host"), "\u202e"),
        (("origins",), []),
        (("origins",), PAYLOAD["origins"] * 2),
        (("numerics",), []),
        (("numerics",), PAYLOAD["numerics"] * 2),
        (("numerics", 0, "chunk"), 0),
        (("numerics", 0, "blas_threads"), -1),
        (("prefix", "key"), "0" * 63),
        (("prefix", "size"), -1),
        (("prefix", "digest"), "0" * 64),
        (("segments", 0, "numerics"), 1),
        (("segments", 0, "numerics"), -1),
        (("segments", 0, "origins"), []),
        (("segments", 0, "origins"), [1]),
        (("segments", 0, "origins"), [-1]),
        (("segments", 0, "origins"), [0, 0]),
        (("segments", 0, "origins"), [[]]),
        (("segments", 0, "lineage"), "warm"),
        (("segments", 0, "blobs", 0, "class"), "cache"),
        (("segments", 0, "blobs", 0, "digest"), "../../x"),
        (("segments", 0, "blobs", 0, "codec"), "zstd"),
        (("segments", 0, "blobs", 0, "encoded_size"), -1),
        (("points", 0, "kinds"), []),
        (("points", 0, "kinds"), ["other"]),
        (("points", 0, "kinds"), ["stride", "fork"]),
        (("points", 0, "kinds"), ["fork", "fork"]),
        (("points", 0, "kinds"), [[]]),
        (("identity", "model_files"), "weights"),
        (("identity", "adapters"), [1]),
        (("identity", "adapters"), ["a"]),
    ],
    ids=str,
)
def test_a_value_out_of_form_is_refused(path, value):
    with pytest.raises(FormatError):
        Manifest.from_json(with_value(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("block_size",), 8193),
        (("audience",), [f"ed25519:{n:064x}" for n in range(33)]),
        (("segments",), PAYLOAD["segments"][:1] * (SEGMENTS + 1)),
        (("points",), PAYLOAD["points"][:1] * (POINTS + 1)),
        (("numerics",), PAYLOAD["numerics"] * 1025),
        (("prefix", "tokens"), TOKENS + 1),
        (("prefix", "size"), 4 * TOKENS + 1),
        (("segments", 0, "end"), TOKENS + 1),
        (("segments", 0, "blobs"), PAYLOAD["segments"][0]["blobs"] * 2),
        (("segments", 0, "blobs", 0, "size"), (1 << 30) + 1),
        (("points", 0, "kinds"), ["fork"] * 5),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_above_a_limit_is_refused(path, value):
    with pytest.raises(LimitExceededError):
        Manifest.from_json(with_value(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [(("format_version",), 2), (("format_version",), 0), (("artifact_kind",), "delta")],
)
def test_another_version_is_named_before_its_fields_are_looked_at(path, value):
    document = {**with_value(path, value), "unknown": 1}
    with pytest.raises(UnsupportedVersionError):
        Manifest.from_json(document)


def test_what_is_not_printable_is_not_written_by_default():
    manifest = ManifestBuilder(name="a\x07").manifest()
    with pytest.raises(FormatError):
        Manifest.from_json(strict_loads(manifest.encode()))


def test_identities_name_their_differences():
    mine = identity_of(DENSE)
    theirs = attrs.evolve(
        identity_of(HYBRID, "others"), mlx_lm="0.33.0", quant={"bits": 4}
    )
    names = ("model_files", "quant", "layout", "mlx_lm")
    assert mine.mismatched_fields(theirs) == names
    assert mine.mismatched_fields(identity_of(DENSE)) == ()


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(StateIdentity)])
def test_every_field_of_an_identity_counts(name):
    other = {
        "model_files": DIGEST,
        "adapters": (DIGEST,),
        "quant": {"bits": 4},
        "kv": "q8",
        "layout": HYBRID,
        "mlx_lm": "0",
        "state_format": 2,
    }
    mine = identity_of(DENSE)
    theirs = attrs.evolve(mine, **{name: other[name]})
    assert mine.mismatched_fields(theirs) == (name,)
    assert mine.digest != theirs.digest
    assert StateIdentity.from_json(theirs.to_json()) == theirs


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(Numerics)])
def test_every_field_of_numerics_counts(name):
    value = getattr(NUMERICS, name)
    other = value + "x" if isinstance(value, str) else not value if value is True else 7
    theirs = attrs.evolve(NUMERICS, **{name: other})
    assert theirs.digest != NUMERICS.digest
    assert Numerics.from_json(theirs.to_json()) == theirs


def test_a_long_manifest_is_within_the_payload_limit():
    builder = ManifestBuilder(tokens=tuple(range(512)), block_size=1, cuts=())
    data = builder.manifest().encode()
    # The longest has 32 times the segments, of longer numbers.
    assert len(data) / 512 * SEGMENTS < 11 << 20
    assert canonical_dumps(strict_loads(data)) == data


@pytest.mark.parametrize(
    "session",
    [
        {"id": "", "sequence": 1},
        {"id": "work", "sequence": 0},
        {"id": "work", "sequence": -1},
        {"id": "a b", "sequence": 1},
        {"id": "x" * 65, "sequence": 1},
        {"id": "work"},
        {"id": "work", "sequence": 1, "more": 1},
        {"id": "work", "sequence": "1"},
        "work",
    ],
)
def test_a_session_has_a_label_and_a_sequence_or_neither(session):
    with pytest.raises(FormatError):
        Manifest.from_json({**PAYLOAD, "session": session})


def test_an_artifact_may_be_of_no_session():
    payload = {**PAYLOAD, "session": {"id": "", "sequence": 0}}
    assert Manifest.from_json(payload).session == Session()
