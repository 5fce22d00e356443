"""Schemas and decoders agree, but for what no schema can say."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvport.api.problems import STATUS, Problem
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import BindingMismatchError, KvportError, all_codes
from tests.vectors.case import directories, read
from tests.vectors.mutants import DOCUMENTS, mutants
from tests.vectors.schemas import NAMES, SCHEMAS, schema, validator

BEYOND = {
    "the byte form": [
        "not JSON with one reading", "JSON, but not in canonical form",
        "a string is too long", "nested too deeply",
        "not an envelope", "base64 is not in its one form",
        "the envelope's type or signatures are not in form", "not standard base64",
    ],
    "all of Unicode": ["is not printable text", "is not a list of names"],
    "which days there are": ["a time does not exist"],
    "order, and equality of parts": [
        "is not a sorted list of key ids", "are not sorted, or there are none",
        "must be sorted", "is not in order", "are not in order",
        "a list of keys must be sorted by key id",
        "two leaves of a cache have one name", "a sealed blob is listed twice",
        "a cache of the layout has members",
    ],
    "what refers to what": [
        "a table has rows that are unused or out of order",
        "refers to numerics that are not in the table",
        "refers to an origin that is not in the table",
    ],
    "comparisons": [
        "a cache in the layout keeps more than its window",
        "a cache in the layout has more leaves than slots",
    ],
    "keys": [
        "a public key is not canonically encoded", "a public key is a point of small",
        "a trust entry's key id is not that of its key",
    ],
}  # fmt: skip
"""What only decoders refuse, by the reason that a schema cannot say it."""

_VALIDATORS = {name: validator(name) for name in NAMES}


def agreed(document, value) -> None:
    """Hold the decoder's verdict to the schema's."""
    fits = _VALIDATORS[document.schema].is_valid(value)
    message = refusal(document, value)
    if message is None:
        assert fits, "only the schema refuses"
    elif fits:
        assert any(part in message for parts in BEYOND.values() for part in parts), (
            f"only the decoder refuses: {message}"
        )


def refusal(document, value) -> str | None:
    """Why the decoder refuses it."""
    try:
        document.decode(value)
    except KvportError as error:
        return error.message
    return None


_MUTANTS = st.sampled_from(DOCUMENTS).flatmap(
    lambda document: (
        st.sampled_from(document.examples)
        .flatmap(mutants)
        .map(lambda value: (document, value))
    )
)


@given(_MUTANTS)
@settings(max_examples=1000)
def test_mutants(pair):
    agreed(*pair)


@pytest.mark.soak
@given(_MUTANTS)
@settings(max_examples=20_000)
def test_many_mutants(pair):
    agreed(*pair)


def test_what_documents_are_made_from():
    for document in DOCUMENTS:
        for value in document.examples:
            assert _VALIDATORS[document.schema].is_valid(value), document.schema
            document.decode(value)


def test_vectors():
    kinds = {document.schema: document for document in DOCUMENTS}
    seen = set()
    for directory in directories():
        case = read(directory)
        for name, data in _documents(case.container, case.trust):
            value = json.loads(data)
            seen.add((name, _VALIDATORS[name].is_valid(value)))
            if name != "envelope":
                agreed(kinds[name], value)
    assert {name for name, fits in seen if fits} >= {"manifest", "sealed", "trust"}
    assert {name for name, fits in seen if not fits} >= {"manifest", "sealed"}


def _documents(container: bytes, trust: bytes):
    """Name and bytes of the documents that can be read as JSON at all."""
    yield "trust", trust
    try:
        size = int(container[124:135], 8)
        opened = open_envelope(container[512 : 512 + size])
        json.loads(opened.payload)
    except (KvportError, ValueError):
        return
    yield "envelope", container[512 : 512 + size]
    if "sealed" in opened.payload_type:
        yield "sealed", opened.payload
    elif "manifest" in opened.payload_type:
        yield "manifest", opened.payload


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one_and_leaves_nothing_open(name):
    value = schema(name)
    Draft202012Validator.check_schema(value)
    assert value["$id"] == f"urn:kvport:schema:v1:{name}"
    assert value["$comment"]
    for part in _parts(value):
        if "properties" in part and "oneOf" not in part and "required" in part:
            assert part["additionalProperties"] is False
        if part.get("type") == "array" and "items" not in part:
            raise AssertionError(part)
        if isinstance(pattern := part.get("pattern"), str):
            assert re.fullmatch(r"\^.*\$\(\?!\\n\)", pattern), pattern


def _parts(value):
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from _parts(item)


def test_every_pattern_ends_where_the_text_ends():
    for name in NAMES:
        for part in _parts(schema(name)):
            if pattern := part.get("pattern"):
                assert not re.search(pattern, "a\n"), pattern


@pytest.mark.parametrize("path", ["/api/cache/import", "/v1/completions"])
def test_problems_are_those_of_the_schema(path):
    for error in all_codes():
        if error.code in STATUS:
            fields = ["layout"] if error is BindingMismatchError else []
            body = Problem.of(error("what", fields=fields)).at(path).encode()
            _VALIDATORS["problem"].validate(json.loads(body))
    assert not _VALIDATORS["problem"].is_valid({"code": "x"})


def test_schemas_are_written_in_one_way():
    for path in sorted(Path(SCHEMAS / "v1").iterdir()):
        value = json.loads(path.read_bytes())
        assert path.read_text() == json.dumps(value, indent=2) + "\n"
