import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash import shim
from tests.crash.driver import Child, Recorded, record


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def child(library) -> Iterator[Child]:
    child = Child(library)
    yield child
    child.close()


@pytest.fixture(scope="session")
def recorded(child, tmp_path_factory) -> Callable[..., Recorded]:
    """Operations by name, each prepared and recorded once."""
    done: dict[tuple[str, str], Recorded] = {}

    def get(name: str, swallow: str = "") -> Recorded:
        if (name, swallow) not in done:
            base = tmp_path_factory.mktemp(name).resolve()
            done[name, swallow] = record(child, name, base, swallow=swallow)
        return done[name, swallow]

    return get


@pytest.fixture
def report(request, record_property) -> Callable[..., None]:
    """Say how many points there were; in the file that CRASH_REPORT names, too."""

    def say(kind: str, operation: str, points: int, violations: int) -> None:
        line = {"kind": kind, "operation": operation, "points": points}
        line["violations"] = violations
        text = json.dumps(line)
        print(text)
        if path := os.environ.get("CRASH_REPORT"):
            with Path(path).open("a") as file:
                file.write(f"{text}\n")

    return say
