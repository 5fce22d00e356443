import pytest

from tests.cache.builder import open_cache, space


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(root):
    with open_cache(root) as cache:
        yield cache


@pytest.fixture
def ns(cache):
    return space(cache)
