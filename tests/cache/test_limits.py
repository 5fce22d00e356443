"""The cap holds at every moment; a busy model leaves a quiet one its share."""

import pytest

from kvport.manifest.limits import GIB, MIB
from tests.cache.builder import check_account, open_cache
from tests.cache.limits import run


def check(root, *, cap: int, seconds: float, size: int) -> None:
    removed = []
    with open_cache(root, cap, removed) as cache:
        quota = cap // 4
        traffic = run(cache, root, seconds=seconds, quota=quota, size=size)
        check_account(cache, root)
        # It really was about the limit.
        evicted = {gone.namespace for gone in removed if gone.reason == "evicted"}
        assert len(removed) > 20
        assert len(evicted) == 1, "the busy one evicts only itself"
        assert not cache.stats().total.skipped
    assert len(traffic.samples) > 20
    assert max(traffic.samples) <= cap
    assert max(traffic.reserved) <= cap
    assert max(traffic.samples) > cap * 0.8
    assert traffic.hits == traffic.lookups > 10
    assert traffic.least is not None
    assert traffic.least > quota * 0.65
    assert traffic.prompts["busy"] > 2 * traffic.prompts["quiet"]


def test_two_models_at_a_small_cap(root):
    check(root, cap=64 * MIB, seconds=10, size=160_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_models_at_a_cap_of_a_gigabyte(root):
    check(root, cap=GIB, seconds=600, size=500_000)
