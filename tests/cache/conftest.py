import pytest

from tests.cache.builder import Time, open_cache, space


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def cache(root, time):
    with open_cache(root, clocks=time.clocks) as cache:
        yield cache


@pytest.fixture
def ns(cache):
    return space(cache)
