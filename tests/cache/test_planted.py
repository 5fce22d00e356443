"""Rows that somebody wrote into the index: they lead nowhere, and stop nothing."""

import contextlib
import json
import shutil
import sqlite3

import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.limits import MIB
from kvport.snapshot.cache import schema
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.planted import remove_planted
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.stats import Counters
from tests.cache.builder import (
    ALL,
    DENSE,
    check_account,
    evict_all,
    find,
    open_cache,
    position,
    read_or_lose,
    space,
    store,
    walk,
)
from tests.cache.test_tampering import OURS, alter

TOKENS = list(range(1000))
ENDS = [256, 512, 700]
LARGEST = (1 << 63) - 1
VALUES = (LARGEST, -LARGEST - 1, -1, 0, 7, 99_999)
COLUMNS = {
    "file": ("class", "size", "trailer", "alloc", "live", "ns"),
    "node": (
        *("ns", "parent", "start", '"end"', "first_token", "kinds", "children"),
        *("used", "at", "ttl", "expires"),
    ),
    "blob": ("class", "file", "node"),
    "attest": ("claim", "node"),
    "claim": ("numerics",),
    "pin": ("until", "node"),
    "ns": ("block_size", "loaded"),
    "root": ("clock", "scrubbed"),
}


_NAMESPACE = """
INSERT INTO ns (id, identity, scope, block_size, model, source, loaded, mac)
SELECT ?, identity, scope, block_size, model, source, loaded, mac FROM ns LIMIT 1"""
_FILE = """
INSERT INTO file (ns, digest, class, size, trailer, alloc, live)
VALUES (?, ?, 0, 0, 0, ?, ?)"""


def plant(root, sql, values):
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
        connection.execute(sql, values)
        connection.commit()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A closed root with two namespaces, and something in every table."""
    root = tmp_path_factory.mktemp("planted") / "cache"
    with open_cache(root, mac_key=OURS) as cache:
        for model, layout in enumerate((DENSE, ALL)):
            ns = space(cache, layout, model=model)
            for variant, before in enumerate(([], [7])):
                store(
                    cache,
                    ns,
                    [*before, *TOKENS],
                    ENDS,
                    variant=variant,
                    kinds={512: {PointKind.FORK}},
                    ttl=10**6,
                )
            tip = find(cache, ns, TOKENS).nodes[-1].id
            cache.administration.pin(ns.id, tip, "me", 100)
    return root


@pytest.mark.parametrize(
    ("table", "column"),
    [(table, column) for table, columns in COLUMNS.items() for column in columns],
)
def test_no_number_in_any_column_stops_the_cache(root, stored, table, column):
    for value in VALUES:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(stored, root)
        words = ("UPDATE OR IGNORE", table, "SET", column, "=", str(value))
        alter(root, " ".join(words))
        with open_cache(root, mac_key=OURS) as cache:
            check_account(cache, root)
            for model, layout in enumerate((DENSE, ALL)):
                ns = space(cache, layout, model=model)
                if (match := find(cache, ns, TOKENS)) is not None:
                    read_or_lose(cache, ns, match.nodes)
                store(cache, ns, [9, *TOKENS], ENDS, variant=5)
                assert position(cache, ns, [9, *TOKENS]) == 700
            cache.administration.plan(cap=8 * MIB)
            cache.administration.gc()
            cache.administration.pins()
            check_account(cache, root)
            evict_all(cache)
            cache.administration.clear(force=True)
            check_account(cache, root)


@pytest.mark.parametrize("up", ["{victim}", "../../documents", "a/../../../documents"])
def test_a_planted_namespace_leads_to_no_directory(root, tmp_path, stored, up):
    shutil.copytree(stored, root)
    victim = tmp_path / "documents"
    (victim / "inside").mkdir(parents=True)
    (victim / "thesis.txt").write_text("all of it")
    name = up.format(victim=victim)
    plant(root, _NAMESPACE, (name,))
    with open_cache(root, mac_key=OURS) as cache:
        assert sorted(path.name for path in victim.iterdir()) == [
            "inside",
            "thesis.txt",
        ]
        assert position(cache, space(cache, DENSE), TOKENS) == 700
        assert len(cache.administration.namespaces()) == 2
        check_account(cache, root)


@pytest.mark.parametrize(
    "change",
    [
        f"id = '{'0' * 64}'",
        "identity = '{}'",
        "identity = CAST(x'ff' AS TEXT)",
        "scope = 'another'",
        "block_size = block_size * 2",
        "model = 'x'",
        "source = '/'",
        "loaded = 1",
        "mac = zeroblob(16)",
        "mac = x''",
    ],
)
def test_a_namespace_that_was_altered_goes_with_all_that_it_holds(root, stored, change):
    shutil.copytree(stored, root)
    words = ("UPDATE ns SET", change, "WHERE n = 1")
    alter(root, " ".join(words))
    with open_cache(root, mac_key=OURS) as cache:
        assert cache.stats().total.removed == {RemovalReason.TAMPERED: 6}
        assert len(cache.administration.namespaces()) == 1
        check_account(cache, root)
        ns = space(cache, DENSE)
        assert find(cache, ns, TOKENS) is None
        assert position(cache, space(cache, ALL, model=1), TOKENS) == 700
        store(cache, ns, TOKENS, ENDS)
        assert position(cache, ns, TOKENS) == 700
        check_account(cache, root)
    with open_cache(root, mac_key=OURS) as cache:
        assert position(cache, space(cache, DENSE), TOKENS) == 700


@pytest.mark.parametrize("ns", [1, 999])
@pytest.mark.parametrize("alloc", [-(1 << 40), 1 << 40, LARGEST])
@pytest.mark.parametrize("live", [0, 1])
def test_a_planted_file_weighs_nothing(root, stored, ns, alloc, live):
    shutil.copytree(stored, root)
    plant(root, _FILE, (ns, bytes(32), alloc, live))
    with open_cache(root, mac_key=OURS) as cache:
        assert cache.stats().total_bytes == walk(root)
        check_account(cache, root)
        assert position(cache, space(cache, DENSE), TOKENS) == 700


def test_a_value_that_no_mac_covers_costs_no_state(root, stored):
    shutil.copytree(stored, root)
    alter(
        root,
        "UPDATE node SET used = -5, at = -5, children = 9, expires = -1, ttl = -1",
        "UPDATE file SET alloc = -4096, live = 0",
    )
    with open_cache(root, mac_key=OURS) as cache:
        for model, layout in enumerate((DENSE, ALL)):
            assert position(cache, space(cache, layout, model=model), TOKENS) == 700
        check_account(cache, root)
        assert not cache.stats().total.removed


def test_nodes_in_a_circle_go(root, stored):
    shutil.copytree(stored, root)
    alter(
        root,
        "UPDATE node SET parent = 3 WHERE n = 2",
        "UPDATE node SET parent = 2 WHERE n = 3",
    )
    removed = []
    with open_cache(root, removed=removed, mac_key=OURS) as cache:
        assert sorted(gone.end for gone in removed) == [512, 700]
        assert {gone.reason for gone in removed} == {RemovalReason.TAMPERED}
        assert position(cache, space(cache, DENSE), TOKENS) == 256
        check_account(cache, root)


def test_state_is_there_after_a_start_that_finds_nothing_planted(root, stored):
    shutil.copytree(stored, root)
    before = (root / "index.sqlite").read_bytes()
    root_id = json.loads((root / "root.json").read_text())["id"]
    key = RowMac(OURS, root_id)
    connection = schema.connect(root / "index.sqlite", root_id, key.root())
    try:
        remove_planted(connection, key, Counters())
        assert not connection.total_changes
    finally:
        connection.close()
    assert (root / "index.sqlite").read_bytes() == before
