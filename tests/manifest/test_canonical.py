import json
import string

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.errors import FormatError, LimitExceededError
from kvport.manifest.limits import JSON_DEPTH, STRING_BYTES

KEYS = st.builds(
    str.__add__,
    st.sampled_from(string.ascii_lowercase),
    st.text(string.ascii_lowercase + string.digits + "_", max_size=8),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
VALUES = st.recursive(
    st.booleans() | INTEGERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def depth(value):
    if not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, items), default=0)


@given(VALUES.filter(lambda value: depth(value) <= JSON_DEPTH))
def test_bytes_are_those_of_jcs_and_read_back(value):
    data = canonical_dumps(value)
    assert data == rfc8785.dumps(value)
    assert strict_loads(data) == value


@given(VALUES.filter(lambda value: depth(value) <= JSON_DEPTH), st.data())
def test_no_other_spelling_is_read(value, data):
    canonical = canonical_dumps(value)
    spellings = [
        json.dumps(value, indent=1),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, sort_keys=True),
    ]
    other = data.draw(st.sampled_from(spellings)).encode("utf-8", "surrogatepass")
    if other != canonical:
        with pytest.raises(FormatError):
            strict_loads(other)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"a":1} ',
        b'{"a":1}\n',
        b' {"a":1}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"b":1,"a":1}',
        b'{"a":1.0}',
        b'{"a":1e2}',
        b'{"a":-0}',
        b'{"a":01}',
        b'{"a":null}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":9007199254740992}',
        b'{"a":-9007199254740992}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"A":1}',
        b'{"":1}',
        b'{"1a":1}',
        b'{"a-b":1}',
        '{"\u00e4":1}'.encode(),
        b'{"a":"\\u0041"}',
        b'{"a":"\\/"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\x00"}',
        b"{a:1}",
        b"[" * 100_000,
    ],
)
def test_bytes_out_of_form_are_refused(data):
    with pytest.raises(FormatError):
        strict_loads(data)


@pytest.mark.parametrize(
    "value", [1.0, None, float("nan"), {1: 2}, {"A": 1}, (1,), b""]
)
def test_values_outside_of_the_subset_are_not_written(value):
    with pytest.raises(FormatError):
        canonical_dumps(value)


def test_a_lone_surrogate_is_not_written():
    with pytest.raises(FormatError):
        canonical_dumps("\ud800")


def test_nesting_is_limited():
    deepest: object = 1
    for _ in range(JSON_DEPTH):
        deepest = [deepest]
    assert strict_loads(canonical_dumps(deepest)) == deepest
    with pytest.raises(LimitExceededError):
        canonical_dumps([deepest])
    with pytest.raises(LimitExceededError):
        strict_loads(json.dumps([deepest]).encode())


def test_strings_are_limited_in_bytes():
    longest = "\u00e4" * (STRING_BYTES // 2)
    assert strict_loads(canonical_dumps([longest])) == [longest]
    with pytest.raises(LimitExceededError):
        canonical_dumps([longest + "a"])
    with pytest.raises(LimitExceededError):
        strict_loads(f'["{longest}a"]'.encode())
