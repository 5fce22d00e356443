"""A restore that takes longer than its lease is not trusted: it is made again."""

from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.leases import LEASE_SECONDS
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.requests import Request
from kvport.snapshot.engine.restore import Restorer
from tests.cache.builder import Time
from tests.transfer.world import HYBRID, NUMERICS, TOKENS, Home


def test_b77_a_read_that_outlived_its_lease_is_dropped(tmp_path, monkeypatch):
    """The machine sleeps while state is read; on waking it may be gone, or other's."""
    time = Time()
    home = Home(tmp_path / "home", layout=HYBRID, clocks=time.clocks)
    home.store()
    sleeps = [LEASE_SECONDS]
    reads = 0
    read = Cache.read

    def slow(*args):
        nonlocal reads
        reads += 1
        data = read(*args)
        if sleeps:
            time.passes(sleeps.pop())
        return data

    monkeypatch.setattr(Cache, "read", slow)
    restorer = Restorer(
        cache=home.cache,
        namespace=home.ns,
        request=Request(tokens=[*TOKENS, 7], max_tokens=1),
        owner="request",
        local=home.key_id,
        numerics=NUMERICS,
        retention=Retention(),
        tail=None,
        suspect=lambda: None,
    )
    prepared = restorer.prepare()
    assert prepared.restored == 11
    assert prepared.assembly.complete
    blobs = reads
    prepared.chain.close()
    home.cache.flush()
    assert not home.cache.administration.leases()
    # Nothing of the first attempt was used: all was read again.
    assert not sleeps
    reads = 0
    restorer.prepare().chain.close()
    assert blobs == 2 * reads
    home.close()
