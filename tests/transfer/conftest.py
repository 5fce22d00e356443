from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.world import Home


@pytest.fixture
def home(tmp_path) -> Iterator[Callable[..., Home]]:
    """Open homes by name; all are closed at the end."""
    opened: list[Home] = []

    def open_home(name: str, **options: Any) -> Home:
        opened.append(Home(tmp_path / name, **options))
        return opened[-1]

    yield open_home
    for one in opened:
        one.close()


@pytest.fixture(scope="session")
def origin(tmp_path_factory) -> Iterator[Home]:
    """A home with a prefix, for tests that only export from it."""
    found = Home(tmp_path_factory.mktemp("transfer") / "origin")
    found.store()
    yield found
    found.close()


@pytest.fixture
def pair(home, origin) -> tuple[Home, Home]:
    """`origin`, and an empty home that trusts its key."""
    b = home("b")
    b.trusted.append(origin.key)
    return origin, b
