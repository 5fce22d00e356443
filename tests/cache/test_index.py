"""The index at scale: bytes an entry, lookups among many, ids behind the rows."""

import contextlib
import os
import sqlite3

import pytest

from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache import schema
from kvport.snapshot.errors import StorageError
from tests.cache.builder import (
    BLOCK,
    HYBRID,
    check_account,
    find,
    open_cache,
    position,
    segments,
    space,
    store,
)
from tests.cache.many import Filled

TOKENS = list(range(1000))
ENTRIES = 20_000
TARGET = 400
"""Bytes an entry: a node of 256 tokens with one blob."""


def blob_path(root, ns, ref):
    return root / "ns" / ns.id / ref.digest.hex()


def test_an_entry_takes_no_more_than_its_bytes(tmp_path):
    with contextlib.closing(Filled(tmp_path)) as filled:
        filled.add(ENTRIES)
        assert filled.bytes_an_entry() <= TARGET
        filled.index.checkpoint()
        assert (tmp_path / "index.sqlite").stat().st_size <= TARGET * ENTRIES


def test_a_long_prompt_is_found_among_others(tmp_path):
    with contextlib.closing(Filled(tmp_path)) as filled:
        filled.add(1000)
        prompt = filled.add_path(64)
        filled.add(1000)
        match = filled.match(prompt)
        assert (match.position, len(match.nodes)) == (64 * BLOCK, 64)
        assert filled.match(prompt[: 4 * 40 * BLOCK]).position == 40 * BLOCK


# Ids behind the rows.


def test_the_ids_of_rows_lie_behind_them_and_are_not_part_of_them(cache, ns, root):
    tip = store(cache, ns, TOKENS, [256, 300])
    encoded = encode_tokens(TOKENS)
    for node in cache.path(ns, tip):
        [ref] = node.blobs
        data = blob_path(root, ns, ref).read_bytes()
        ids = encoded[4 * node.start : 4 * node.end]
        assert data == bytes(cache.read(ns, ref)) + ids
        assert (ref.size, ref.trailer) == (len(data) - len(ids), len(ids))
        with cache.open_blob(ns, ref) as file:
            assert file.read() == cache.read(ns, ref)
            assert file.read(1) == b""
        assert node.tokens == b""


def test_states_and_windows_have_no_ids_behind_them(cache):
    ns = space(cache, HYBRID)
    [node] = cache.path(ns, store(cache, ns, TOKENS, [256]))
    assert [(r.blob_class, r.trailer) for r in node.blobs] == [
        (BlobClass.KV, 1024),
        (BlobClass.STATE, 0),
    ]


def flipped(path, size):
    data = bytearray(path.read_bytes())
    data[size + 7] ^= 1
    path.write_bytes(data)


def unreadable(path, size):
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    (path / "away").write_bytes(data)


@pytest.mark.parametrize("harm", [flipped, unreadable])
def test_ids_that_cannot_be_read_are_nothing_in_common(cache, ns, root, harm):
    tip = store(cache, ns, TOKENS, [256, 512])
    ref = cache.path(ns, tip)[1].blobs[0]
    prompt = [*TOKENS[:300], 7]
    assert position(cache, ns, prompt) == 300
    harm(blob_path(root, ns, ref), ref.size)
    assert position(cache, ns, prompt) == 256
    assert cache.longest(ns, encode_tokens(prompt)) == 256
    # Not reported; whole segments are found by their keys.
    assert not cache.stats().total.damaged
    assert position(cache, ns, TOKENS) == 512


def test_a_node_with_the_rows_and_ids_of_another_gives_no_wrong_match(cache, ns):
    """As only a hostile import would store it: one blob under two keys."""
    [mine] = segments(ns, TOKENS, [256])
    [other] = segments(ns, [TOKENS[0], *range(5000, 5300)], [256])
    for segment in (mine, other):
        chain = cache.chain(ns, ROOT_NODE, "test")
        chain.append(type(segment)(
            segment.start, segment.end, segment.key, segment.tokens, segment.kinds,
            mine.blobs, segment.provenance,
        ))  # fmt: skip
        chain.close()
    cache.flush()
    assert position(cache, ns, [*TOKENS[:100], 7]) == 100
    assert position(cache, ns, [TOKENS[0], *range(5000, 5100), 7]) == 1
    assert position(cache, ns, [TOKENS[0], *range(5000, 5300)]) == 256


# Lookups among many.


def test_a_whole_segment_is_found_among_very_many(cache, ns):
    prompts = [[1, 2, 3, n, *range(60 + n % 7)] for n in range(300)]
    for prompt in prompts:
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, prompt, [len(prompt)], size=600):
            chain.append(segment)
        chain.close()
    cache.flush()
    for prompt in prompts[::23]:
        match = find(cache, ns, [*prompt, 9])
        assert match.position == len(prompt)
        assert (
            find(cache, ns, prompt, limit=len(prompt) - 1).position == len(prompt) - 1
        )
        within = frozenset(node.id for node in match.nodes)
        assert position(cache, ns, prompt[:20], within=within) == 20
    # Of the many that a prompt leaves, the newest few are looked at.
    assert position(cache, ns, [1, 2, 3, 7777]) == 3
    assert position(cache, ns, [*prompts[-1][:50], 7777]) == 50


def test_b87_a_prefix_of_one_token_matches_and_reads_renew(root):
    with open_cache(root) as cache:
        ns = space(cache)
        for first in (10, 20):
            store(cache, ns, [first], [1])
        assert position(cache, ns, [10, 99]) == 1
        assert position(cache, ns, [20]) == 1
        assert position(cache, ns, [10]) == 1
        cache._index.store_touched()
        oldest = cache._index.all("SELECT first_token FROM node ORDER BY used")
        assert oldest == [(20,), (10,)]
        assert cache._evictor.free(1)
        assert position(cache, ns, [20]) == 0
        assert position(cache, ns, [10]) == 1


def test_b75_a_path_that_lost_its_middle_is_restored_up_to_the_gap(cache, ns, root):
    tip = store(cache, ns, TOKENS, [256, 512, 768])
    ref = cache.path(ns, tip)[1].blobs[0]
    blob_path(root, ns, ref).unlink()
    cache.report_damage(ns, ref)
    for _ in range(2):
        assert position(cache, ns, TOKENS) == 256
    assert store(cache, ns, TOKENS, [256, 512, 768]) == tip
    assert position(cache, ns, TOKENS) == 768
    check_account(cache, root)


# A damaged index.


def spoil(root, table):
    """Write over all pages of a table but its root's."""
    path = root / "index.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ((top,),) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)
        )
        pages = [
            page
            for (page,) in connection.execute(
                "SELECT pageno FROM dbstat WHERE name = ?", (table,)
            )
            if page != top
        ]
    assert pages
    with path.open("r+b") as file:
        for page in pages:
            os.pwrite(file.fileno(), b"\xa5" * 4096, (page - 1) * 4096)


def test_a_small_index_is_read_whole_at_each_start(root):
    with open_cache(root) as cache:
        fill(cache, 300)
    spoil(root, "node_id")
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 1


@pytest.mark.parametrize("table", ["node_id", "node_whole"])
def test_damage_that_is_found_in_use_is_mended_by_the_next_start(
    root, table, monkeypatch
):
    monkeypatch.setattr(schema, "THOROUGH_BYTES", 0)
    with open_cache(root) as cache:
        ns, tips = fill(cache, 300)
    spoil(root, table)
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 0
        with pytest.raises(StorageError, match="damaged"):
            use(cache, ns, tips)
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 1
        assert store(cache, space(cache), TOKENS, [100])
        check_account(cache, root)
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 0
        assert position(cache, ns, TOKENS[:100]) == 100


@pytest.mark.parametrize("table", ["file", "node"])
def test_damage_that_the_start_meets_empties_the_cache(root, table, monkeypatch):
    monkeypatch.setattr(schema, "THOROUGH_BYTES", 0)
    with open_cache(root) as cache:
        fill(cache, 300)
    spoil(root, table)
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 1
        check_account(cache, root)


def use(cache, ns, tips):
    for number, tip in enumerate(tips):
        assert cache.path(ns, tip)
        assert position(cache, ns, [number, *TOKENS]) == 100


def fill(cache, count):
    """Many paths of one segment; answers their ends."""
    ns, chains = space(cache), []
    for number in range(count):
        chains.append(cache.chain(ns, ROOT_NODE, "test"))
        chains[-1].append(*segments(ns, [number, *TOKENS], [100], size=600))
        chains[-1].close()
    cache.flush()
    return ns, [chain.tip for chain in chains]
