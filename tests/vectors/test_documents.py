"""docs/format.md: its examples are right, and its numbers are the code's."""

import json
import re
from pathlib import Path

import pytest

from kvport.manifest import limits
from kvport.manifest.blob_layout import DTYPE_BYTES
from kvport.manifest.domains import Domain, PayloadType
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import all_codes
from kvport.manifest.layout import CacheKind
from tests.vectors.case import ROOT, read
from tests.vectors.schemas import NAMES, validator

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "format.md").read_text()
EXAMPLES = re.findall(r"^```json(.*?)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
OF_VECTORS = {"manifest": "one-token", "sealed": "sealed"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
def test_an_example_is_valid(example):
    name = example[0].strip()
    value = json.loads(example[1])
    validator(name).validate(value)
    if vector := OF_VECTORS.get(name):
        container = read(ROOT / "valid" / vector).container
        size = int(container[124:135], 8)
        assert value == json.loads(open_envelope(container[512 : 512 + size]).payload)


def test_there_are_examples_and_no_json_besides():
    assert {name.strip() for name, _ in EXAMPLES} >= {"manifest", "sealed", "trust"}
    for page in ("format.md", "security.md"):
        marks = re.findall(
            r"^```(\w*)(?: \w+)?$", (DOCS / page).read_text(), re.MULTILINE
        )
        assert set(marks) <= {"json", ""}, page


def test_every_context_and_type_is_there():
    stored_only = {
        Domain.NAMESPACE,
        Domain.NUMERICS,
        Domain.MESSAGE_KEY,
        Domain.MESSAGE_SALT,
    }
    for name in set(Domain) - stored_only:
        assert name in TEXT, name
    for kind in PayloadType:
        assert kind in TEXT


def test_every_code_of_verification_is_there():
    for error in all_codes():
        if error.__module__ == "kvport.manifest.errors" and error.code != "internal":
            assert f"`{error.code}`" in TEXT, error.code


def test_limits_are_the_codes():
    for count in (
        limits.SEGMENTS,
        limits.POINTS,
        limits.BLOBS,
        limits.CACHES,
        limits.BLOCK_TOKENS,
        limits.DERIVED_TENSORS,
    ):
        assert f"{count:,}" in TEXT
    assert limits.TOKENS == 1 << 20
    for name in (*DTYPE_BYTES, *CacheKind, *NAMES[1:2]):
        assert f"`{name}`" in TEXT


def test_pages_point_to_files_that_exist():
    for page in ("format.md", "security.md"):
        for target in re.findall(r"\]\(([a-z./]+)\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), target
