from collections.abc import Callable
from typing import Any

import pytest
from tests.transfer.world import Home


@pytest.fixture
def home(tmp_path) -> Callable[..., Home]:
    """Open homes by name; all are closed at the end."""
    opened: list[Home] = []

    def open_home(name: str, **options: Any) -> Home:
        opened.append(Home(tmp_path / name, **options))
        return opened[-1]

    yield open_home
    for one in opened:
        one.close()


@pytest.fixture
def pair(home) -> tuple[Home, Home]:
    """`a` holds a prefix; `b` is empty, and trusts a's key."""
    a, b = home("a"), home("b")
    b.trusted.append(a.key)
    a.store()
    return a, b
