from datetime import UTC, datetime, timedelta, timezone

import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.errors import (
    FormatError,
    LimitExceededError,
    UntrustedKeyError,
    WeakKeyError,
)
from kvport.manifest.keys import SigningKey
from kvport.manifest.timestamps import ALWAYS, format_time, parse_time
from kvport.manifest.trust import ANY, Role, TrustEntry, TrustList
from tests.manifest.builder import KEY, NOW, OTHER_KEY

ENTRY = TrustEntry(
    public_key=KEY.public,
    name="mac-a",
    not_before=NOW - timedelta(days=1),
    not_after=NOW + timedelta(days=1),
    scopes=frozenset({"default", "team"}),
    models=frozenset({"tiny"}),
)
TRUST = TrustList((ENTRY,))


def allow(trust, now=NOW):
    return trust.allows(KEY.public.key_id, now=now, role=Role.EXPORT)


def test_a_listed_key_is_allowed():
    assert allow(TRUST).public_key == KEY.public


def test_an_empty_list_refuses_everything():
    with pytest.raises(UntrustedKeyError):
        allow(TrustList())


def test_an_unlisted_key_is_refused():
    with pytest.raises(UntrustedKeyError):
        TRUST.allows(OTHER_KEY.public.key_id, now=NOW, role=Role.EXPORT)


def test_trust_begins_at_not_before_and_ends_at_not_after():
    assert allow(TRUST, ENTRY.not_before)
    with pytest.raises(UntrustedKeyError):
        allow(TRUST, ENTRY.not_before - timedelta(seconds=1))
    assert allow(TRUST, ENTRY.not_after - timedelta(seconds=1))
    with pytest.raises(UntrustedKeyError):
        allow(TRUST, ENTRY.not_after)


def test_a_key_without_the_role_is_refused():
    with pytest.raises(UntrustedKeyError):
        allow(TrustList((attrs.evolve(ENTRY, roles=frozenset()),)))


def test_scopes_and_models_are_those_named_or_any():
    assert ENTRY.allows_scope("team")
    assert not ENTRY.allows_scope("other")
    assert not ENTRY.allows_scope("*")
    assert ENTRY.allows_model("tiny")
    assert not ENTRY.allows_model("other")
    everywhere = attrs.evolve(ENTRY, scopes=ANY, models=ANY)
    assert everywhere.allows_scope("other")
    assert everywhere.allows_model("other")
    nowhere = attrs.evolve(ENTRY, scopes=frozenset(), models=frozenset())
    assert not nowhere.allows_scope("default")
    assert not nowhere.allows_model("tiny")


def test_a_list_survives_its_bytes():
    other = TrustEntry(public_key=OTHER_KEY.public, name="b")
    trust = TrustList.of([other, ENTRY])
    assert trust == TrustList.of([ENTRY, other])
    assert TrustList.from_json(trust.to_json()) == trust
    assert TrustList.from_json(TrustList().to_json()) == TrustList()


def test_one_key_has_one_entry():
    with pytest.raises(FormatError):
        TrustList.of([ENTRY, attrs.evolve(ENTRY, name="again")])


def test_a_list_is_limited_in_size():
    with pytest.raises(LimitExceededError):
        TrustList.from_json(bytes((1 << 20) + 1))
    many = frozenset(f"{n:0500}" for n in range(1024))
    entries = [
        TrustEntry(public_key=key.public, name="", models=many, scopes=ANY)
        for key in (KEY, OTHER_KEY, SigningKey.generate())
    ]
    with pytest.raises(LimitExceededError):
        TrustList.of(entries).to_json()


@pytest.mark.parametrize(
    "fields",
    [
        {"extra": 1},
        {"key_id": OTHER_KEY.public.key_id},
        {"public_key": OTHER_KEY.public.raw.hex()},
        {"public_key": KEY.public.raw.hex().upper()},
        {"name": 1},
        {"name": "\x1b[2J"},
        {"roles": ["admin"]},
        {"roles": ["export", "export"]},
        {"roles": "export"},
        {"scopes": ["team", "default"]},
        {"scopes": ["*", "default"]},
        {"scopes": ["a b"]},
        {"scopes": [1]},
        {"scopes": [[]]},
        {"models": ["\n"]},
        {"models": [""]},
        {"not_after": "2026-03-02"},
    ],
)
def test_what_is_not_an_entry_is_refused(fields):
    document = strict_loads(TRUST.to_json())
    document["entries"][0].update(fields)
    with pytest.raises(FormatError):
        TrustList.from_json(canonical_dumps(document))


@pytest.mark.parametrize("name", sorted(ENTRY.to_json()))
def test_an_entry_without_a_field_is_refused(name):
    document = strict_loads(TRUST.to_json())
    del document["entries"][0][name]
    with pytest.raises(FormatError):
        TrustList.from_json(canonical_dumps(document))


@pytest.mark.parametrize(
    "fields",
    [{"format": "kvport"}, {"format_version": 2}, {"extra": 1}, {"entries": 1}],
)
def test_another_document_is_refused(fields):
    document = {**strict_loads(TRUST.to_json()), **fields}
    with pytest.raises(FormatError):
        TrustList.from_json(canonical_dumps(document))


def test_a_weak_key_cannot_be_listed():
    document = strict_loads(TRUST.to_json())
    document["entries"][0]["public_key"] = "01" + "00" * 31
    with pytest.raises(WeakKeyError):
        TrustList.from_json(canonical_dumps(document))


def test_times_are_written_in_utc_and_whole_seconds():
    east = datetime(2026, 3, 1, 14, 0, 0, 999_999, timezone(timedelta(hours=2)))
    assert format_time(east) == "2026-03-01T12:00:00Z"
    assert parse_time("2026-03-01T12:00:00Z") == NOW
    assert [parse_time(format_time(time)) for time in ALWAYS] == list(ALWAYS)
    assert parse_time("2024-02-29T00:00:00Z").tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-03-01T12:00:00",
        "2026-03-01T12:00:00z",
        "2026-03-01 12:00:00Z",
        "2026-03-01T12:00:00.0Z",
        "2026-03-01T12:00:00+00:00",
        "20260301T120000Z",
        "2026-3-1T12:00:00Z",
        "2026-02-29T12:00:00Z",
        "2026-03-01T24:00:00Z",
        "2026-03-01T12:00:60Z",
        "0000-01-01T00:00:00Z",
        "\u0662026-03-01T12:00:00Z",
    ],
)
def test_times_have_one_spelling(text):
    with pytest.raises(FormatError):
        parse_time(text)
