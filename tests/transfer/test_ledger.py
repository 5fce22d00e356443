"""The ledger: private, durable, bounded, and settled after a crash."""

import sqlite3
import stat
import threading
from contextlib import suppress

import attrs
import pytest

from kvport.manifest.digests import Key
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.records import RemovalReason, Removed
from kvport.snapshot.errors import StorageError
from kvport.snapshot.transfer import ledger as ledger_module
from kvport.snapshot.transfer.ledger import Direction, Ledger, Papers
from kvport.snapshot.transfer.ledger_tables import FORMAT
from tests.transfer.world import NOW, TOKENS, dump

PAPERS = Papers(b"envelope")


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "state.sqlite")
    yield opened
    opened.close()


def removed(*names: int, namespace: str = "ns") -> list[Removed]:
    return [
        Removed(namespace, Key(bytes([n]) * 32), n, RemovalReason.EVICTED)
        for n in names
    ]


def keys(*names: int) -> list[Key]:
    return [Key(bytes([n]) * 32) for n in names]


def test_nobody_else_may_read_it(tmp_path, ledger):
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


def test_a_second_owner_is_refused(tmp_path, ledger):
    with pytest.raises(StorageError):
        Ledger(tmp_path / "state.sqlite")


def test_tables_of_another_format_are_refused(tmp_path):
    path = tmp_path / "state.sqlite"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={FORMAT + 1}")
    connection.close()
    with pytest.raises(StorageError):
        Ledger(path)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError):
        Ledger(path)


def test_a_removed_key_is_remembered_over_a_restart(tmp_path):
    first = Ledger(tmp_path / "state.sqlite")
    first.record_removed(removed(1, 2))
    first.close()
    second = Ledger(tmp_path / "state.sqlite")
    assert second.was_removed("ns", keys(2)) == "evicted"
    assert second.was_removed("ns", keys(3)) is None
    assert second.was_removed("other", keys(2)) is None
    second.close()


def test_the_longest_removed_prefix_answers(ledger):
    (short, long) = removed(1, 2)
    ledger.record_removed([short, attrs.evolve(long, reason=RemovalReason.DAMAGED)])
    assert ledger.was_removed("ns", keys(1, 2, 3)) == "damaged"


def test_the_oldest_removed_keys_are_dropped(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "REMOVED_ROWS", 3)
    ledger.record_removed(removed(1, 2, 3))
    ledger.record_removed(removed(1))  # again: now the newest
    ledger.record_removed(removed(4))
    assert ledger.was_removed("ns", keys(2)) is None
    assert all(ledger.was_removed("ns", keys(n)) for n in (1, 3, 4))


def test_a_failing_ledger_does_not_stop_evictions(tmp_path):
    closed = Ledger(tmp_path / "state.sqlite")
    closed.close()
    closed.record_removed(removed(1))


def test_an_import_is_recorded_with_its_signed_bytes(pair):
    a, b = pair
    opened = a.open_export()
    b.take(b"".join(opened.stream()))
    (record,) = b.ledger.artifacts()
    assert record.id == opened.artifact_id
    assert record.direction is Direction.ADMITTED
    assert (record.namespace, record.scope, record.model) == (
        b.ns.id,
        "default",
        "tiny",
    )
    assert record.issuer == a.key_id
    assert (record.created, record.expires) == (
        opened.manifest.terms.created,
        opened.manifest.terms.expires,
    )
    assert (record.tokens, record.size) == (len(TOKENS), opened.size)
    assert record.tip == b.match().nodes[-1].id
    assert record.recorded == NOW
    assert b.ledger.namespace(record) == b.ns
    assert b.ledger.papers(record).manifest() == opened.manifest


def test_an_import_and_an_export_of_one_artifact_are_two_records(home):
    a = home("a")
    a.store()
    opened = a.open_export()
    opened.keep(a.ledger, NOW)
    a.take(b"".join(opened.stream()))
    assert {r.direction for r in a.ledger.artifacts()} == set(Direction)
    for direction in Direction:
        found = a.ledger.find(opened.artifact_id, direction, scope="default")
        assert found.direction is direction


def test_the_envelope_of_a_record_that_went(ledger, pair):
    a, b = pair
    b.take(a.export())
    (record,) = b.ledger.artifacts()
    with pytest.raises(StorageError):
        ledger.papers(record)


def test_an_intent_is_not_listed(pair):
    a, b = pair
    b.take(a.export())
    (record,) = b.ledger.artifacts()
    other = attrs.evolve(record, scope="other")
    with b.ledger.admission(other, PAPERS):
        assert b.ledger.artifacts() == [record]
    assert len(b.ledger.artifacts()) == 2


def test_an_admission_that_fails_leaves_no_record(pair):
    a, b = pair
    b.take(a.export())
    (record,) = b.ledger.artifacts()
    other = attrs.evolve(record, scope="other")
    before = dump(b.ledger)
    with (
        pytest.raises(ZeroDivisionError),
        b.ledger.admission(other, PAPERS),
    ):
        raise ZeroDivisionError
    assert dump(b.ledger) == before


@pytest.mark.parametrize("there", [True, False])
def test_reconcile_asks_the_cache_about_an_intent(pair, there):
    a, b = pair
    b.take(a.export())
    (record,) = b.ledger.artifacts()
    papers = b.ledger.papers(record)
    b.ledger._forget(record)
    if not there:
        record = attrs.evolve(record, tip=NodeId(bytes(32)[:-1] + b"x"))
    with b.ledger._transaction():
        b.ledger._put(record, papers, ledger_module._Status.INTENT)
    assert b.ledger.artifacts() == []
    b.ledger.reconcile(b.cache)
    assert b.ledger.artifacts() == ([record] if there else [])
    assert b.ledger._select("TRUE", (), ledger_module._Status.INTENT) == []


def test_a_failing_admission_does_not_take_anothers_record_away(pair):
    a, b = pair
    b.take(a.export())
    (record,) = b.ledger.artifacts()
    record = attrs.evolve(record, scope="other")

    def admit():
        with b.ledger.admission(record, PAPERS):
            pass

    second = threading.Thread(target=admit)
    with suppress(ZeroDivisionError), b.ledger.admission(record, PAPERS):
        second.start()
        second.join(timeout=0.1)  # it would be through, were it let in now
        raise ZeroDivisionError
    second.join()
    assert b.ledger.artifacts("other") == [record]
