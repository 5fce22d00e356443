"""Facts of a home, and files that are none."""

import pytest

from kvport.snapshot.remembered import Remembered


def test_facts_survive_and_are_private(tmp_path):
    path = tmp_path / "facts.json"
    Remembered(path).put("a", "1")
    Remembered(path).put("b", "2")
    again = Remembered(path)
    assert (again.get("a"), again.get("b"), again.get("c")) == ("1", "2", None)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"[]", b'{"a": 1}', b"[" * 100_000, b"\xff"])
def test_a_file_of_another_shape_is_an_empty_one(tmp_path, data):
    path = tmp_path / "facts.json"
    path.write_bytes(data)
    facts = Remembered(path)
    assert facts.get("a") is None
    facts.put("a", "1")
    assert Remembered(path).get("a") == "1"
