"""An import keeps to the hourly write budget of the namespace that it is for."""

import pytest

from kvport.snapshot.cache.account import BLOCK
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.errors import WriteBudgetError
from tests.cache.builder import check_account


def allow(home, limit) -> None:
    settings = NamespaceSettings(write_bytes_per_hour=limit)
    home.cache.configure(home.ns.id, settings)


def spent(home) -> int:
    return home.cache._counters.budget.spent(home.ns.id)


def written(home) -> int:
    return home.cache.stats().total.written_bytes


def empty(home) -> None:
    home.cache.administration.clear(None)


@pytest.fixture
def data(origin):
    return origin.export()


@pytest.fixture
def files(origin):
    """Sizes of the blobs that an import writes."""
    match = origin.match()
    blobs = {ref.digest: ref.size for node in match.nodes for ref in node.blobs}
    assert all(size <= BLOCK // 2 for size in blobs.values())
    return list(blobs.values())


def test_an_import_above_the_budget_is_refused_before_a_byte_is_staged(
    pair, data, files, monkeypatch
):
    _, b = pair
    allow(b, len(files) * BLOCK - 1)
    before = b.state()
    made = []
    monkeypatch.setattr(b.cache, "staging", made.append)
    with pytest.raises(WriteBudgetError) as caught:
        b.take(data)
    assert caught.value.code == "write_budget"
    assert str(len(files) * BLOCK) in caught.value.message
    assert not made
    assert b.state() == before
    assert spent(b) == written(b) == 0


def test_what_an_import_writes_is_spent_and_counted(pair, data, files):
    _, b = pair
    allow(b, len(files) * BLOCK)
    assert b.take(data).restored_tokens == 11
    assert spent(b) == len(files) * BLOCK
    assert written(b) == sum(files)
    total = b.cache.stats().total
    assert total.written_per_captured_token is None, "nothing was captured"
    # What is stored is not written again.
    assert b.take(data).present_segments == 4
    assert spent(b) == len(files) * BLOCK
    for _ in range(3):
        empty(b)
        with pytest.raises(WriteBudgetError):
            b.take(data)
    assert written(b) == sum(files)
    check_account(b.cache, b.directory / "cache")


def test_an_import_that_fails_has_spent_what_it_wrote(pair, data, files):
    _, b = pair
    running = b.start_import()
    for start in range(0, len(data) - 1024, 64):
        running.feed(data[start : start + 64])
    running.abort()
    assert spent(b) >= BLOCK
    assert 0 < written(b) <= sum(files)
    assert b.match() is None
    # What it did not write is free again.
    allow(b, spent(b) + len(files) * BLOCK)
    assert b.take(data).restored_tokens == 11
    assert spent(b) <= b.cache.settings(b.ns.id).write_bytes_per_hour
    check_account(b.cache, b.directory / "cache")


def test_imports_at_once_share_the_budget(pair, data, files):
    _, b = pair
    allow(b, 2 * len(files) * BLOCK - 1)
    first, second = b.start_import(), b.start_import()
    half = len(data) // 2
    first.feed(data[:half])
    with pytest.raises(WriteBudgetError):
        second.feed(data[:half])
    first.feed(data[half:])
    assert first.finish().restored_tokens == 11
    assert spent(b) == len(files) * BLOCK
