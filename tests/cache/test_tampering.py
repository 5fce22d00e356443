"""Rows that were not written with the home's key: removed, counted, never restored."""

import contextlib
import sqlite3

import attrs
import pytest

from kvport.manifest.identity import PointKind
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import ForeignRootError, GoneError
from tests.cache.builder import (
    ALL,
    COLD,
    OTHER,
    check_account,
    claim,
    find,
    open_cache,
    position,
    read_all,
    space,
    store,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]
OURS, THEIRS = b"o" * 32, b"t" * 32


def alter(root, *statements):
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def filled(root):
    """Two paths with everything; the middle node of the first has row 2."""
    with open_cache(root, mac_key=OURS) as cache:
        ns = space(cache, ALL)
        options = {"provenance": claim(origins=[OTHER])}
        tip = store(cache, ns, TOKENS, ENDS, kinds={512: {PointKind.FORK}}, **options)
        store(cache, ns, [7, *TOKENS], ENDS, provenance=COLD)
        return ns, tip


TAMPERED = {
    "id": "UPDATE node SET id = zeroblob(32) WHERE n = 2",
    "longer id": "UPDATE node SET id = CAST(id || x'00' AS BLOB) WHERE n = 2",
    "start": "UPDATE node SET start = 200 WHERE n = 2",
    "start beyond": "UPDATE node SET start = 999 WHERE n = 2",
    "kinds": "UPDATE node SET kinds = 15 WHERE n = 2",
    "negative kinds": "UPDATE node SET kinds = -1 WHERE n = 2",
    "mac": "UPDATE node SET mac = zeroblob(16) WHERE n = 2",
    "no mac": "UPDATE node SET mac = x'' WHERE n = 2",
    "another's mac": "UPDATE node SET mac = (SELECT mac FROM node WHERE n = 3)"
    " WHERE n = 2",
    "blob": "UPDATE blob SET file = (SELECT file FROM blob WHERE node = 3"
    " AND class = 0) WHERE node = 2 AND class = 0",
    "another class": "UPDATE blob SET class = 3 WHERE node = 2 AND class = 2",
    "less blobs": "DELETE FROM blob WHERE node = 2 AND class = 0",
    "digest": "UPDATE file SET digest = zeroblob(32)"
    " WHERE n = (SELECT file FROM blob WHERE node = 2 AND class = 0)",
    "attested by us": "UPDATE attest SET claim = 2 WHERE node = 2",
    "one more claim": "INSERT INTO attest VALUES (2, 2)",
    "no claim": "DELETE FROM attest WHERE node = 2",
}


@pytest.mark.parametrize("statement", TAMPERED.values(), ids=TAMPERED)
def test_a_row_that_was_altered_goes_with_all_below_it(root, statement):
    ns, tip = filled(root)
    alter(root, statement)
    removed = []
    with open_cache(root, removed=removed, mac_key=OURS) as cache:
        match = find(cache, ns, TOKENS)
        assert match.position == 256
        read_all(cache, ns, match.nodes)
        # What does not fit the files was found by the start.
        reason = "missing" if "digest" in statement else RemovalReason.TAMPERED
        assert {gone.reason for gone in removed} == {reason}
        assert sorted(gone.end for gone in removed) == [512, 700]
        with pytest.raises(GoneError):
            cache.path(ns, tip)
        assert position(cache, ns, [7, *TOKENS]) == 700
        check_account(cache, root)
        # Stored again, it is ours again.
        assert store(cache, ns, TOKENS, ENDS) == tip
        assert position(cache, ns, TOKENS) == 700
        read_all(cache, ns, cache.path(ns, tip))
        check_account(cache, root)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE node SET kinds = 7 WHERE n = 1",
        "UPDATE node SET parent = 3 WHERE n = 1",
        "UPDATE node SET parent = 77, start = 10 WHERE n = 1",
        "UPDATE claim SET lineage = 'cold' WHERE n = 1",
        "UPDATE claim SET lineage = 'icy' WHERE n = 1",
        "UPDATE claim SET origins = 'nobody' WHERE n = 1",
        "UPDATE numerics SET json = '{}'",
        "UPDATE numerics SET json = '['",
        "UPDATE ns SET id = 'x'",
    ],
)
def test_a_path_with_a_planted_head_restores_nothing(root, statement):
    ns, tip = filled(root)
    alter(root, statement)
    with open_cache(root, mac_key=OURS) as cache:
        space(cache, ALL)
        assert find(cache, ns, TOKENS) is None
        with pytest.raises(GoneError):
            cache.path(ns, tip)
        check_account(cache, root)
        assert store(cache, ns, TOKENS, ENDS) == tip
        assert position(cache, ns, TOKENS) == 700


def test_a_path_asked_for_by_name_is_held_to_its_macs_too(root):
    ns, tip = filled(root)
    alter(root, "UPDATE node SET kinds = 1 WHERE n = 2")
    removed = []
    with open_cache(root, removed=removed, mac_key=OURS) as cache:
        with pytest.raises(GoneError):
            cache.path(ns, tip)
        assert {gone.reason for gone in removed} == {RemovalReason.TAMPERED}
        assert sorted(gone.end for gone in removed) == [512, 700]
        assert cache.stats().total.removed == {RemovalReason.TAMPERED: 2}


def test_a_planted_row_does_not_become_ours_by_being_stored_again(root):
    ns, tip = filled(root)
    alter(
        root,
        "UPDATE node SET kinds = 15 WHERE n = 3",
        "INSERT INTO attest VALUES (3, 2)",
    )
    with open_cache(root, mac_key=OURS) as cache:
        assert store(cache, ns, TOKENS, ENDS) == tip
        last = cache.path(ns, tip)[-1]
        assert not last.kinds
        assert last.attestations == (claim(),)
        check_account(cache, root)


def test_a_planted_row_does_not_become_ours_by_losing_a_blob(root):
    ns, tip = filled(root)
    alter(root, "INSERT INTO attest VALUES (3, 2)")
    with open_cache(root, mac_key=OURS) as cache:
        assert not cache._index.is_sealed(3)
        with cache._index.transaction():
            cache._index.drop(3, ["state"], [])
        assert not cache._index.is_sealed(3)
        cache._evictor.unlink_doomed()
        assert position(cache, ns, TOKENS) == 512
        with pytest.raises(GoneError):
            cache.path(ns, tip)


def test_a_copied_row_is_not_taken_elsewhere(root):
    """Rows of one root of this home do not fit another root."""
    row = ((b"ns", bytes(32), bytes(32), bytes(32)), (0, 256, 0), (), ())
    macs = {
        RowMac(key, name).node(*row) for key in (OURS, THEIRS) for name in ("a", "b")
    }
    assert len(macs) == 4


@pytest.mark.parametrize("key", [THEIRS, None])
def test_a_cache_of_another_home_is_left_alone(root, key):
    ns, _ = filled(root)
    before = {path: path.stat().st_size for path in root.rglob("*")}
    with pytest.raises(ForeignRootError, match="another home"):
        open_cache(root, mac_key=key)
    assert {path: path.stat().st_size for path in root.rglob("*")} == before
    with open_cache(root, mac_key=OURS) as cache:
        assert position(cache, ns, TOKENS) == 700
        assert cache.stats().index_resets == 0


def test_what_is_changed_by_us_is_sealed_again(root):
    ns, tip = filled(root)
    with open_cache(root, mac_key=OURS) as cache:
        before = cache.path(ns, tip)
        store(cache, ns, TOKENS, ENDS, provenance=COLD, kinds={700: {PointKind.REPLY}})
        after = cache.path(ns, tip)
        assert after[-1].kinds == {PointKind.REPLY}
        assert [len(n.attestations) for n in after] == [2, 2, 2]
        assert [attrs.evolve(n, kinds=frozenset(), attestations=()) for n in after] == [
            attrs.evolve(n, kinds=frozenset(), attestations=()) for n in before
        ]
