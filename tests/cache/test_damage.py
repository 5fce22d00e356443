"""Damage on the medium: a counted miss, and the file goes."""

import os
import shutil

import pytest

from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import DamagedError, GoneError
from tests.cache.builder import (
    ALL,
    DENSE,
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    segments,
    space,
    store,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def extend(path):
    with path.open("ab") as file:
        file.write(b"\0")


def link(path):
    away = path.parent.parent.parent.parent / "elsewhere"
    path.rename(away)
    path.symlink_to(away)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("layout", [DENSE, ALL])
@pytest.mark.parametrize("harm", [flip, cut, extend, link, remove])
def test_a_damaged_blob_goes_with_all_that_hangs_on_it(root, layout, harm):
    count = len(ENDS) * len(layout.blob_classes)
    # Each blob of the path for flipped bits, the middle one for the rest.
    for which in range(count) if harm is flip else [count // 2]:
        removed = []
        with open_cache(root, removed=removed) as cache:
            ns = space(cache, layout)
            tip = store(cache, ns, TOKENS, ENDS)
            store(cache, ns, [7, *TOKENS], ENDS)
            nodes = cache.path(ns, tip)
            index, ref = [(i, r) for i, n in enumerate(nodes) for r in n.blobs][which]
            path = root / "ns" / ns.id / ref.digest.hex()
            harm(path)
            with pytest.raises(DamagedError):
                cache.read(ns, ref)
            with pytest.raises(GoneError):
                cache.read(ns, ref)
            assert not os.path.lexists(path)
            assert not cache.has_blob(ns, ref.digest)
            assert {gone.end for gone in removed} == set(ENDS[index:])
            stats = cache.stats()
            reason = "missing" if harm is remove else "damaged"
            assert stats.removed == {reason: len(ENDS) - index}
            assert stats.damaged == 1
            # The next lookup walks back to what is whole, and that reads.
            match = find(cache, ns, TOKENS)
            assert (match.position if match else 0) == [0, *ENDS][index]
            read_all(cache, ns, match.nodes if match else ())
            assert position(cache, ns, [7, *TOKENS]) == ENDS[-1]
            check_account(cache, root)
            # Stored again, it is whole again.
            assert store(cache, ns, TOKENS, ENDS) == tip
            read_all(cache, ns, cache.path(ns, tip))
        shutil.rmtree(root)


@pytest.mark.parametrize("harm", [cut, extend, link, remove])
def test_start_finds_files_that_do_not_fit_their_rows(root, harm):
    with open_cache(root) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, ENDS)
        ref = cache.path(ns, tip)[1].blobs[0]
    harm(root / "ns" / ns.id / ref.digest.hex())
    removed = []
    with open_cache(root, removed=removed) as cache:
        assert {gone.end for gone in removed} == set(ENDS[1:])
        assert len(blob_files(root)) == 1
        assert position(cache, ns, TOKENS) == ENDS[0]
        check_account(cache, root)


def test_damage_found_while_streaming_is_reported(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]
    flip(root / "ns" / ns.id / first.digest.hex())
    cache.report_damage(ns, first)
    cache.report_damage(ns, first)
    assert find(cache, ns, TOKENS) is None
    assert cache.stats().damaged == 1
    with pytest.raises(GoneError):
        cache.open_blob(ns, first)


def test_a_stream_of_a_blob_without_its_file_is_damage(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]
    (root / "ns" / ns.id / first.digest.hex()).unlink()
    with pytest.raises(DamagedError):
        cache.open_blob(ns, first)
    assert cache.stats().removed == {RemovalReason.MISSING: 3}


def test_a_chain_below_removed_state_breaks(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    chain = cache.chain(ns, tip, "test")
    cache.report_damage(ns, cache.path(ns, tip)[0].blobs[0])
    for segment in segments(ns, TOKENS, [800, 900], start=700):
        chain.append(segment)
    cache.flush()
    assert chain.broken == "gone"
    chain.append(*segments(ns, TOKENS, [950], start=900))
    chain.close()
    cache.flush()
    stats = cache.stats()
    assert stats.skipped == {"gone": 3}
    assert stats.leases == 0
    assert not blob_files(root)
    check_account(cache, root)


def test_a_namespace_directory_that_was_removed_is_made_again(cache, ns, root):
    store(cache, ns, TOKENS, ENDS)
    chain = cache.chain(ns, find(cache, ns, TOKENS).tip, "test")
    shutil.rmtree(root / "ns" / ns.id)
    chain.append(*segments(ns, TOKENS, [800], start=700))
    cache.flush()
    assert chain.broken == "gone"
    assert find(cache, ns, TOKENS) is None
    tip = store(cache, ns, TOKENS, ENDS)
    read_all(cache, ns, cache.path(ns, tip))
    assert cache.stats().removed == {RemovalReason.MISSING: 3}
    chain.close()
    cache.flush()
    check_account(cache, root)


def test_a_removed_directory_is_found_by_reads_too(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    shutil.rmtree(root / "ns" / ns.id)
    with pytest.raises(DamagedError):
        read_all(cache, ns, cache.path(ns, tip))
    assert find(cache, ns, TOKENS) is None
    store(cache, ns, TOKENS, ENDS)
    assert position(cache, ns, TOKENS) == 700
