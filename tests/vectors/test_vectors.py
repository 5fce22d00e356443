"""Every vector is judged as it says, by kvport and by the independent verifier."""

import ast
import json
import sys
from pathlib import Path

import pytest

from kvport.manifest.errors import all_codes
from tests.vectors.case import directories, read
from tests.vectors.independent import judge as judge_independently
from tests.vectors.judging import examine, judge
from tests.vectors.write import DIGESTS, ROOT, all_cases, vector_digest

VECTORS = directories()
EVERY = pytest.mark.parametrize("directory", VECTORS, ids=lambda path: path.name)


def expected(directory: Path) -> dict:
    value = json.loads((directory / "expect.json").read_bytes())
    assert value.pop("breaks" if directory.parent.name == "invalid" else "about")
    return value


@EVERY
def test_a_vector_is_judged_as_it_says(directory):
    assert judge(read(directory)) == expected(directory)


@EVERY
def test_the_independent_verifier_agrees(directory):
    assert judge_independently(directory) == expected(directory)


@pytest.mark.parametrize("step", [1, 511, 4096])
def test_valid_vectors_are_the_same_in_chunks_of_any_length(step):
    for directory in VECTORS:
        if directory.parent.name == "valid":
            assert examine(read(directory), step) == expected(directory)


def test_there_are_enough_of_them():
    names = [directory.parent.name for directory in VECTORS]
    assert names.count("invalid") >= 60
    assert names.count("valid") >= 12


def test_every_code_that_verification_has_is_there():
    codes = {expected(d)["code"] for d in VECTORS if d.parent.name == "invalid"}
    missing = {
        error.code for error in all_codes() if error.__module__.startswith("kvport.man")
    } - codes
    # The last two take memory, and another document: they are the importer's.
    assert missing == {"internal", "rollback", "own_key"}


def test_vectors_are_frozen():
    found = {d.relative_to(ROOT).as_posix(): vector_digest(read(d)) for d in VECTORS}
    assert found == json.loads(DIGESTS.read_bytes())
    for directory in VECTORS:
        files = read(directory).files()
        assert {path.name for path in directory.iterdir()} == set(files)
        for name, data in files.items():
            assert (directory / name).read_bytes() == data


def test_they_are_what_is_written_today():
    """Up to zstd's own choices, which another version may make otherwise."""
    made = {case.directory(): case.files() for case in all_cases()}
    assert set(made) == set(VECTORS)
    for directory, files in made.items():
        if directory.name != "encoded-by-zstd":
            assert read(directory).files() == files


def test_the_independent_verifier_shares_nothing():
    parts = sorted(Path(__file__).parent.glob("independent*.py"))
    own = {f"tests.vectors.{path.stem}" for path in parts}
    assert len(own) == 4
    for path in parts:
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in getattr(node, "names", ())]
            match node:
                case ast.Import():
                    pass
                case ast.ImportFrom(module=module, level=0):
                    names = [module]
                case ast.ImportFrom() | ast.Name(id="__import__" | "exec" | "eval"):
                    raise AssertionError(f"{path.name}: {ast.dump(node)}")
                case _:
                    continue
            for name in names:
                top = name.partition(".")[0]
                allowed = {*sys.stdlib_module_names, "blake3", "cryptography"}
                assert name in own or top in allowed - {"importlib"}, name
                assert name != "cryptography.cobblestone"
                assert not name.startswith("cryptography.hazmat.primitives.hpke")
