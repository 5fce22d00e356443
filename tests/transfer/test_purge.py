"""Purging by origin in real caches: what goes, what stays, what never comes again."""

import attrs
import pytest

from kvport.manifest.errors import RevokedKeyError
from kvport.manifest.identity import Lineage, Provenance
from kvport.snapshot.cache.purge import Purged
from kvport.snapshot.errors import ArtifactUnknownError, GoneError, RevokedStateError
from kvport.snapshot.transfer.exporter import reopen_export
from tests.transfer.world import ALL, NOW, NUMERICS, TOKENS, Home

LONGER = [*TOKENS, *range(200, 209)]


def imported(a: Home, b: Home) -> None:
    b.trusted.append(a.key)
    b.take(a.export())


def on_top(b: Home, *origins: Home) -> None:
    """What a request on B stores that restored what came from these."""
    chain = b.cache.chain(b.ns, b.match().nodes[-1].id, "test")
    segments = b.segments(LONGER, (12, 16, 20), start=11, kinds={20: {"reply"}})
    keys = frozenset(home.key_id for home in (b, *origins))
    for segment in segments:
        said = Provenance(Lineage.DERIVED, NUMERICS, keys)
        chain.append(attrs.evolve(segment, provenance=said))
    chain.close()
    b.cache.flush()
    assert chain.broken is None


def nodes(home: Home) -> int:
    return home.cache._index.all("SELECT count(*) FROM node")[0][0]


def blob_files(home: Home) -> list:
    root = home.directory / "cache" / "ns"
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.fixture
def a(home) -> Home:
    found = home("a")
    found.store()
    return found


@pytest.fixture
def b(home) -> Home:
    return home("b")


def test_what_was_imported_and_what_hangs_on_it_goes(a, b):
    imported(a, b)
    on_top(b, a)
    assert nodes(b) == 7
    outcome = b.purge(a.key)
    assert outcome.cache.removed_segments == 7
    assert outcome.artifacts == 1
    assert b.match() is None
    assert b.match(LONGER) is None
    assert nodes(b) == 0
    assert blob_files(b) == []
    assert b.ledger.artifacts() == []
    assert b.ledger.was_removed(b.ns.id, [a.match().nodes[-1].key]) == "revoked"


def test_purging_again_does_nothing(a, b):
    imported(a, b)
    b.purge(a.key)
    again = b.purge(a.key)
    assert again.cache == Purged()
    assert again.artifacts == 0


def test_what_something_else_is_true_of_stays_without_the_claim(a, b):
    """B had computed the same bytes itself: one node, two statements."""
    b.store(lineage=Lineage.COLD)
    imported(a, b)
    assert nodes(b) == 4
    on_top(b, a)
    before = nodes(b)
    outcome = b.purge(a.key)
    assert outcome.cache.removed_segments == 3
    assert outcome.cache.kept_segments == 4
    assert nodes(b) == before - 3
    # Their rows are sound: what is found is held to its MAC.
    for node in b.match().nodes:
        assert {said.origins for said in node.attestations} == {frozenset({b.key_id})}
    assert b.match(LONGER).position == 11
    assert b.contents(b.match().nodes) == a.contents(a.match().nodes)


def test_a_child_of_ones_own_under_a_revoked_parent_goes(a, b):
    imported(a, b)
    on_top(b)
    assert b.purge(a.key).cache.removed_segments == 7


def test_other_variants_and_other_keys_stay(a, b, home):
    c = home("c")
    c.store(variant="c")
    imported(a, b)
    imported(c, b)
    b.store(variant="own")
    assert b.purge(a.key).cache.removed_segments == 4
    assert {o for n in b.match().nodes for s in n.attestations for o in s.origins} <= {
        b.key_id,
        c.key_id,
    }
    assert [record.issuer for record in b.ledger.artifacts()] == [c.key_id]


def test_an_origin_that_did_not_sign_counts(a, b, home):
    """C brought what came from A: its signer is trusted, A is revoked later."""
    c = home("c")
    imported(a, c)
    c.trusted.append(a.key)
    b.trusted.append(c.key)
    b.take(c.export())
    (record,) = b.ledger.artifacts()
    assert record.issuer == c.key_id
    assert record.origins == {a.key_id}
    data = c.export()
    outcome = b.purge(a.key)
    assert (outcome.cache.removed_segments, outcome.artifacts) == (4, 1)
    with pytest.raises(RevokedKeyError):
        b.take(data)


@pytest.mark.parametrize("sealed", [False, True])
def test_sealed_or_not_the_record_goes_and_it_is_not_taken_again(a, b, sealed):
    b.trusted.append(a.key)
    recipients = (b.recipient.public,) if sealed else ()
    data = a.export(recipients=recipients)
    b.take(data)
    assert b.purge(a.key).artifacts == 1
    with pytest.raises(RevokedKeyError):
        b.take(data)


def test_neither_pins_nor_leases_protect_it(a, b):
    imported(a, b)
    tip = b.match().nodes[-1].id
    b.cache.administration.pin(b.ns.id, tip, "z", 3600)
    lease = b.cache.lease(b.ns, tip, "reader")
    b.purge(a.key)
    assert nodes(b) == 0
    assert b.cache.administration.pins() == []
    assert b.cache.administration.leases() == []
    with pytest.raises(GoneError):
        lease.check()


def test_an_open_export_ends_and_a_kept_one_is_barred(a, b):
    imported(a, b)
    sending, kept = b.open_export(), b.open_export()
    kept.keep(b.ledger, NOW)
    stream = sending.stream()
    next(stream)
    assert b.purge(a.key).artifacts == 2
    with pytest.raises(GoneError):
        list(stream)
    with pytest.raises(GoneError):
        kept.keep(b.ledger, NOW)
    with pytest.raises(RevokedStateError):
        b.export()
    with pytest.raises(ArtifactUnknownError):
        reopen_export(b.cache, b.ledger, kept.artifact_id, **b.reopening())


def test_what_is_on_its_way_is_not_stored_afterwards(a, b):
    """A request that restored such state goes on for a step, and an import ends."""
    imported(a, b)
    tip = b.match().nodes[1].id
    b.store(variant="own", cuts=(4, 8), tokens=TOKENS[:8], kinds={})
    chain = b.cache.chain(b.ns, tip, "test")
    taking = b.start_import()
    taking.feed(a.export())
    b.purge(a.key)
    with pytest.raises(RevokedKeyError):
        taking.finish()
    own = b.cache.chain(b.ns, bytes(32), "test")
    for on, start in ((chain, 8), (own, 0)):
        segments = b.segments(TOKENS, (11,) if start else (4,), start=start, kinds={})
        for segment in segments:
            said = Provenance(Lineage.DERIVED, NUMERICS, frozenset({a.key_id}))
            on.append(attrs.evolve(segment, provenance=said))
        on.close()
    b.cache.flush()
    assert (chain.broken, own.broken) == ("gone", "revoked")
    assert nodes(b) == 2


def test_a_row_that_was_planted_does_not_become_ours(a, b):
    b.store(lineage=Lineage.COLD)
    imported(a, b)
    index = b.cache._index
    with index.transaction():
        index.all("UPDATE node SET mac = x'00' WHERE start = 0")
    b.purge(a.key)
    assert b.match() is None


def test_layouts_of_all_kinds_are_purged(a, b):
    assert a.ns.layout == ALL
    imported(a, b)
    assert b.purge(a.key).cache.freed_bytes > 0
    assert b.cache.stats().account.blobs == 0
