"""What goes out comes in: the same path, the same bytes, and who answers for it."""

import io
import threading
from datetime import timedelta

import attrs
import pytest

from kvport.manifest.errors import UntrustedKeyError
from kvport.manifest.identity import Lineage, PointKind
from kvport.manifest.trust import TrustList
from kvport.snapshot.cache.records import ExactRule
from kvport.snapshot.errors import UnknownModelError
from kvport.snapshot.transfer.archive import inspect_file, verify_file
from kvport.snapshot.transfer.importer import LocalModel
from tests.transfer.world import (
    ALL,
    BLOCK,
    CUTS,
    DENSE,
    HYBRID,
    KINDS,
    NOW,
    NUMERICS,
    TOKENS,
    WINDOWED,
    identity_of,
)


@pytest.mark.parametrize("layout", [DENSE, WINDOWED, HYBRID, ALL])
@pytest.mark.parametrize("step", [1 << 20, 700, 1])
def test_an_import_restores_the_exporters_path(home, layout, step):
    a, b = home("a", layout=layout), home("b", layout=layout)
    b.trusted.append(a.key)
    tip = a.store()
    opened = a.open_export()
    data = b"".join(opened.stream())
    assert len(data) == opened.size

    result = b.take(data, step=step)

    assert result.artifact_id == opened.artifact_id
    assert (result.model, result.restored_tokens) == ("tiny", 11)
    assert (result.admitted_segments, result.present_segments) == (4, 0)
    here, there = a.cache.path(a.ns, tip), b.match().nodes
    assert here == there
    assert a.contents(here) == b.contents(there)


def test_an_import_leaves_no_lease_no_reservation_and_nothing_staged(pair):
    a, b = pair
    b.take(a.export())
    stats = b.cache.stats()
    assert (stats.leases, stats.account.held) == (0, 0)
    assert list((b.directory / "cache" / "staging").iterdir()) == []
    assert a.cache.stats().leases == 0


def test_an_export_is_deterministic_but_for_nonce_and_times(pair):
    a, _ = pair
    one, two = a.open_export(), a.open_export(now=NOW + timedelta(days=1))
    assert one.artifact_id != two.artifact_id
    assert attrs.evolve(two.manifest, terms=one.manifest.terms) == one.manifest
    assert two.manifest.terms == attrs.evolve(
        one.manifest.terms,
        created=two.manifest.terms.created,
        expires=two.manifest.terms.expires,
        nonce=two.manifest.terms.nonce,
    )
    one.close()
    two.close()


def test_an_export_ends_at_the_last_restore_point(home):
    a = home("a", layout=HYBRID)
    a.store(kinds={8: {PointKind.STRIDE}, 10: {PointKind.FORK}})
    opened = a.open_export()
    assert opened.restorable_tokens == 10
    assert [p.position for p in opened.manifest.points] == [8, 10]
    opened.close()


def test_an_end_without_point_is_made_one_where_windows_restore(home):
    a, b = home("a", layout=WINDOWED), home("b", layout=WINDOWED)
    b.trusted.append(a.key)
    a.store(kinds={}, windows=CUTS)
    opened = a.open_export(TOKENS[:9])
    assert [(p.position, p.kinds) for p in opened.manifest.points] == [
        (8, (PointKind.PROMPT,))
    ]
    assert b.take(b"".join(opened.stream())).restored_tokens == 8


def test_the_description_says_what_the_artifact_is(pair):
    a, _ = pair
    opened = a.open_export()
    assert opened.describe() == {
        "artifact_id": opened.artifact_id,
        "restorable_tokens": 11,
        "size_bytes": opened.size,
        "format_version": 1,
        "model": "tiny",
        "quant": {"bits": 4},
        "engine_version": "mlx-lm 0.32.2",
        "prefix_digest": f"blake3:{opened.manifest.prefix.digest.hex()}",
        "session": {"id": "", "sequence": 0},
    }
    opened.close()


def test_importing_again_changes_nothing(pair):
    a, b = pair
    data = a.export()
    first = b.take(data)
    before = b.state()
    again = b.take(data)
    assert (again.admitted_segments, again.present_segments) == (0, 4)
    assert again.restored_tokens == first.restored_tokens
    assert b.state() == before


def test_two_imports_of_one_artifact_at_once_both_succeed(pair):
    a, b = pair
    data = a.export()
    start, results = threading.Barrier(2), []

    def run():
        start.wait()
        results.append(b.take(data, step=100))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.restored_tokens for r in results] == [11, 11]
    assert sorted(r.admitted_segments for r in results) == [0, 4]
    assert len(b.ledger.artifacts()) == 1
    assert b.state()["leases"] == 0


def test_an_import_adds_only_what_is_missing_of_the_path(pair):
    a, b = pair
    b.take(a.export(TOKENS[:10]))
    result = b.take(a.export())
    assert (result.admitted_segments, result.present_segments) == (1, 3)


def test_another_variant_of_the_prefix_stays_whole(pair):
    a, b = pair
    own = b.store(variant="computed here")
    own_path = b.cache.path(b.ns, own)
    own_bytes = b.contents(own_path)
    tip = a.open_export()
    data = b"".join(tip.stream())

    assert b.take(data).admitted_segments == 4

    record = b.ledger.artifacts()[0]
    brought = b.cache.path(b.ns, record.tip)
    assert b.contents(brought) == a.contents(a.match().nodes)
    assert b.cache.path(b.ns, own) == own_path
    assert b.contents(own_path) == own_bytes
    ids = frozenset(node.id for node in brought)
    assert b.match(within=ids).nodes == brought
    assert b.match().nodes == own_path  # made here, on a tie


def test_what_was_imported_can_be_exported_and_imported_on(home):
    a, b, c = home("a"), home("b"), home("c")
    b.trusted.append(a.key)
    c.trusted.append(b.key)
    a.store()
    b.take(a.export())
    assert c.take(b.export()).restored_tokens == 11
    origins = {o for n in c.match().nodes for p in n.attestations for o in p.origins}
    assert origins == {a.key_id, b.key_id}


def test_state_brought_by_others_never_counts_as_made_here(home):
    a, b = home("a"), home("b")
    a.trusted.append(b.key)
    b.trusted.append(a.key)
    a.store(lineage=Lineage.COLD)
    exact = ExactRule(chunk=NUMERICS.chunk, numerics=NUMERICS)
    b.take(a.export())
    from_b = b.export()
    # Says that a alone made it, which a cannot know of b's bytes.
    assert {s.provenance.origins for s in inspect_file(_file(from_b)).manifest.segments}
    a.close()
    fresh = home("a-again")
    fresh.key, fresh.key_id = a.key, a.key_id
    fresh.trusted.append(b.key)
    fresh.take(from_b)
    assert fresh.match() is not None
    assert fresh.match(exact=exact) is None


def test_ones_own_export_counts_as_made_here_again(home, tmp_path):
    a = home("a", layout=DENSE)
    a.store(lineage=Lineage.COLD)
    data = a.export()
    fresh = home("fresh", layout=DENSE)
    fresh.key_id = a.key_id
    fresh.trusted.append(a.key)
    fresh.take(data)
    exact = ExactRule(chunk=NUMERICS.chunk, numerics=NUMERICS)
    assert fresh.match(exact=exact).position == 8


def test_the_model_is_found_by_identity_among_several(home):
    a, b = home("a"), home("b")
    b.trusted.append(a.key)
    a.store()
    other = b.cache.namespace(identity_of(DENSE), "default", BLOCK)
    models = [LocalModel("other", b.models[0].tokenizer_digest, other), *b.models]
    result = b.take(a.export(), models=models)
    assert result.model == "tiny"


def test_without_a_model_there_is_nothing_to_import_for(pair):
    a, b = pair
    with pytest.raises(UnknownModelError):
        b.take(a.export(), models=[])


def test_state_goes_into_the_callers_scope_only(home):
    a, b = home("a"), home("b", scope="team")
    b.trusted.append(a.key)
    a.store()
    b.take(a.export())
    other = b.cache.namespace(b.ns.identity, "default", BLOCK)
    assert b.match() is not None
    assert b.cache.longest(other, b"".join(n.tokens for n in b.match().nodes)) == 0
    assert [r.scope for r in b.ledger.artifacts("team")] == ["team"]
    assert b.ledger.artifacts("default") == []


def test_a_file_is_inspected_without_trust_and_verified_with_it(pair):
    a, b = pair
    opened = a.open_export()
    data = b"".join(opened.stream())
    found = inspect_file(_file(data))
    assert found.manifest == opened.manifest
    assert found.artifact_id == opened.artifact_id
    assert found.signers == (a.key_id,)
    verified = verify_file(_file(data), trust=b.trust(), now=NOW)
    assert verified.artifact_id == opened.artifact_id
    with pytest.raises(UntrustedKeyError):
        verify_file(_file(data), trust=TrustList(), now=NOW)


def test_kinds_of_points_travel(pair):
    a, b = pair
    b.take(a.export())
    assert {n.end: n.kinds for n in b.match().nodes if n.kinds} == KINDS


def _file(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)
