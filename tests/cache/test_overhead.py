"""Directories on the account: true where they change, cheap where they do not."""

import os
import shutil
from collections import Counter

import pytest

from kvport.snapshot.cache import overhead
from tests.cache.builder import (
    check_account,
    evict_all,
    open_cache,
    space,
    store,
    used,
)

CALLS = ("lstat", "open", "scandir", "stat")
SEGMENTS = 300
"""As many names need several blocks where directories have blocks."""


@pytest.fixture
def calls(monkeypatch):
    """Calls that look at the disk, counted by name."""
    found = Counter()
    for name in CALLS:
        real = getattr(os, name)

        def counting(*args, _name=name, _real=real, **kwargs):
            found[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, counting)
    return found


@pytest.fixture
def measured(monkeypatch):
    """Names of what is measured as overhead."""
    found = []

    def measuring(path):
        found.append(path.name)
        return real(path)

    real = overhead.allocated
    monkeypatch.setattr(overhead, "allocated", measuring)
    return found


def least(calls, change, rounds=5):
    """Calls of a change; now and then it looks at the volume too."""
    costs = []
    for number in range(rounds):
        before = calls.total()
        change(number)
        costs.append(calls.total() - before)
    return min(costs)


def test_what_a_batch_and_a_removal_cost_does_not_grow_with_namespaces(root, calls):
    with open_cache(root) as cache:
        ns = space(cache)

        def batch(number):
            store(cache, ns, range(10), [10], variant=(namespaces, number))

        def removal(_):
            store(cache, ns, range(10), [10])
            evict_all(cache)

        costs = []
        for namespaces in (1, 40):
            for model in range(1, namespaces):
                store(cache, space(cache, model=model), range(5), [5])
            costs.append((least(calls, batch), least(calls, removal)))
            check_account(cache, root)
        assert costs[0] == costs[1]
        assert min(costs[0]) > 10


def test_only_directories_of_what_changed_are_measured(root, measured):
    with open_cache(root) as cache:
        one, two = space(cache), space(cache, model=1)
        for ns in (one, two):
            store(cache, ns, range(10), [10])
        for ns, other in ((one, two), (two, one)):
            measured.clear()
            store(cache, ns, range(20), [20], variant=1)
            assert ns.id in measured
            assert other.id not in measured
        measured.clear()
        cache.administration.clear([one.id])
        assert used(cache, one) == 0
        assert one.id in measured
        assert two.id not in measured
        check_account(cache, root)


def test_directories_that_grow_and_are_made_again_stay_on_the_account(root):
    cuts = range(1, SEGMENTS + 1)
    with open_cache(root) as cache:
        spaces = [space(cache, model=model) for model in range(3)]
        for ns in spaces[:2]:
            store(cache, ns, range(SEGMENTS), cuts, size=10)
            check_account(cache, root)
        grown = cache.stats().account.overhead
        evict_all(cache)
        check_account(cache, root)
        # By hand: the one that takes its place is small again.
        shutil.rmtree(root / "ns" / spaces[0].id)
        store(cache, spaces[0], range(10), [10])
        check_account(cache, root)
        assert cache.stats().account.overhead <= grown
    with open_cache(root) as cache:
        check_account(cache, root)
        store(cache, space(cache, model=2), range(10), [10])
        check_account(cache, root)


def test_what_others_made_or_removed_is_on_the_account_after_gc(root):
    with open_cache(root) as cache:
        one, two = space(cache), space(cache, model=1)
        store(cache, one, range(10), [10])
        (root / "ns" / two.id).rmdir()
        (root / "ns" / "made-by-hand").mkdir()
        (root / "ns" / "another").mkdir()
        cache.administration.gc()
        check_account(cache, root)


def test_a_directory_that_cannot_be_measured_is_looked_at_again(root, monkeypatch):
    with open_cache(root) as cache:
        ns = space(cache)
        real = overhead.allocated

        def failing(path):
            if path.name == ns.id:
                raise OSError
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(overhead, "allocated", failing)
            store(cache, ns, range(SEGMENTS), range(1, SEGMENTS + 1), size=10)
        store(cache, space(cache, model=1), range(10), [10])
        check_account(cache, root)
