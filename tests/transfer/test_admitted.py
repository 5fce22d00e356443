"""What was admitted stays until it is proven."""

from tests.cache.builder import check_account, evict_all


def test_an_import_is_not_evicted_before_its_proof(pair, monkeypatch):
    origin, destination = pair
    data = origin.export()
    cache, waiting = destination.cache, destination.cache.flush

    def others_store() -> None:
        waiting()
        evict_all(cache)

    monkeypatch.setattr(cache, "flush", others_store)
    assert destination.take(data).restored_tokens == 11
    assert cache.stats().leases == 0
    check_account(cache, destination.directory / "cache")
