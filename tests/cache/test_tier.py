"""Tiers and write budgets: what a namespace may restore, and add."""

import pytest
from structlog.testing import capture_logs

from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.budget import Allowance, WriteBudget
from kvport.snapshot.cache.policy import NamespaceSettings, Tier
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.errors import StorageError, TierError, WriteBudgetError
from tests.cache.builder import (
    HYBRID,
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    segments,
    space,
    store,
    with_tokens,
)

PROMPT = list(range(600))


def append(cache, ns, cuts, *, tip=ROOT_NODE, start=0, size=1000):
    chain = cache.chain(ns, tip, "test")
    for segment in segments(ns, PROMPT, cuts, start=start, size=size):
        chain.append(segment)
    chain.close()
    cache.flush()
    return chain


def test_read_only_restores_and_takes_nothing(cache, root, ns):
    tip = store(cache, ns, PROMPT, [100, 200])
    nodes = with_tokens(cache.path(ns, tip), encode_tokens(PROMPT))
    files = blob_files(root)
    cache.configure(ns.id, NamespaceSettings(tier=Tier.READ_ONLY))
    assert position(cache, ns, PROMPT) == 200
    with capture_logs() as logs:
        chain = append(cache, ns, [300, 400], tip=tip, start=200)
    assert chain.broken == "tier"
    assert cache.stats().total.skipped == {"tier": 2}
    with cache.reserve(1) as held, pytest.raises(TierError):
        cache.admit(ns, nodes, {}, held)
    assert blob_files(root) == files
    # It is what the operator wants: nothing to warn of.
    assert not logs
    cache.configure(ns.id, NamespaceSettings())
    store(cache, ns, PROMPT, [300, 400], tip=tip, start=200)
    assert position(cache, ns, PROMPT) == 400
    check_account(cache, root)


def test_off_restores_nothing_and_keeps_what_there_is(cache, root, ns):
    store(cache, ns, PROMPT, [100, 200])
    other = space(cache, model=1)
    store(cache, other, PROMPT, [100])
    cache.configure(ns.id, NamespaceSettings(tier=Tier.OFF))
    assert find(cache, ns, PROMPT) is None
    assert cache.stats().total.refused_lookups == 1
    assert append(cache, ns, [50]).broken == "tier"
    assert position(cache, other, PROMPT) == 100
    cache.configure(ns.id, NamespaceSettings())
    assert position(cache, ns, PROMPT) == 200
    check_account(cache, root)


def test_a_namespaces_retention_goes_before_the_models(cache):
    ns = space(cache, HYBRID)
    mine = Retention(newest=1)
    cache.configure(ns.id, NamespaceSettings(retention=mine))
    with_default = cache.chain(ns, ROOT_NODE, "test", Retention(newest=7))
    assert with_default.retention == mine
    with_default.close()


def test_writes_stop_at_the_hours_budget(cache, root, ns):
    cache.configure(ns.id, NamespaceSettings(write_bytes_per_hour=500_000))
    other = space(cache, model=1)
    chain = append(cache, ns, range(100, 600, 100), size=120_000)
    assert chain.broken == "write_budget"
    assert cache.stats().total.skipped == {"write_budget": 1}
    assert position(cache, ns, PROMPT) == 400
    assert append(cache, ns, [50], size=120_000).broken == "write_budget"
    # What is stored already costs nothing.
    assert append(cache, ns, [100, 200], size=120_000).broken is None
    store(cache, other, PROMPT, [100], size=120_000)
    cache.configure(ns.id, NamespaceSettings())
    assert append(cache, ns, [50], size=120_000).broken is None
    check_account(cache, root)


def test_the_hour_slides():
    now = [1_000_000.0]
    budget = WriteBudget(lambda: now[0])
    for _ in range(6):
        budget.add("a", 10)
        now[0] += 600
    assert budget.spent("a") == 60
    assert budget.spent("b") == 0
    allowance = Allowance(budget, "a")
    with pytest.raises(WriteBudgetError, match="0 are left"):
        allowance.cover(1, 60)
    allowance.cover(1, None)
    allowance.release()
    now[0] += 120
    assert budget.spent("a") == 50
    allowance.cover(10, 60)
    with pytest.raises(WriteBudgetError):
        Allowance(budget, "a").cover(1, 60)
    allowance.spend(4)
    allowance.release()
    assert budget.spent("a") == 54
    Allowance(budget, "a").cover(6, 60)
    now[0] += 3660
    assert budget.spent("a") == 0


def test_the_hours_budget_is_spent_still_when_the_cache_was_opened_again(root, time):
    counters = Counters(time.clocks.boot)
    options = {"clocks": time.clocks, "counters": counters}
    with open_cache(root, **options) as cache:
        ns = space(cache)
        cache.configure(ns.id, NamespaceSettings(write_bytes_per_hour=500_000))
        append(cache, ns, range(100, 600, 100), size=120_000)
    with open_cache(root, **options) as cache:
        cache.configure(ns.id, NamespaceSettings(write_bytes_per_hour=500_000))
        assert append(cache, ns, [50], size=120_000).broken == "write_budget"
        time.boot += 3700  # as after sleep, with a wall clock that was set back
        assert append(cache, ns, [50], size=120_000).broken is None
        check_account(cache, root)


def test_what_was_written_is_spent_although_the_batch_was_undone(
    cache, root, ns, monkeypatch
):
    def refuse(*_):
        raise StorageError("the volume refused")

    cache.configure(ns.id, NamespaceSettings(write_bytes_per_hour=200_000))
    with monkeypatch.context() as patch:
        patch.setattr(cache._files, "publish", refuse)
        assert append(cache, ns, [100], size=120_000).broken == "storage"
    assert not blob_files(root)
    assert cache._counters.budget.spent(ns.id) >= 120_000
    assert append(cache, ns, [100], size=120_000).broken == "write_budget"
    check_account(cache, root)


def test_what_an_import_is_about_to_write_is_not_written_by_others(cache, ns):
    cache.configure(ns.id, NamespaceSettings(write_bytes_per_hour=300_000))
    allowance = cache.allow(ns, 200_000)
    with pytest.raises(WriteBudgetError):
        cache.allow(ns, 200_000)
    assert append(cache, ns, [100], size=120_000).broken == "write_budget"
    allowance.release()
    assert append(cache, ns, [100], size=120_000).broken is None
