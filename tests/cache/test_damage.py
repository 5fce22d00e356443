"""Damage on the medium: a counted miss, and the file goes."""

import errno
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
from blake3 import blake3

from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.errors import DamagedError, GoneError, StorageError
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
    walk,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
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


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "link").symlink_to(path.parent.parent)


def listen(path):
    path.unlink()
    # A socket's name may be 108 bytes long: made elsewhere, then moved.
    with socket.socket(socket.AF_UNIX) as server:
        short = os.path.relpath(path.parent.parent.parent / "s")
        server.bind(min(short, str(path.parent.parent.parent / "s"), key=len))
    (path.parent.parent.parent / "s").rename(path)


def device(path):
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


ODD = [link, fifo, directory, listen, device]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("layout", [DENSE, ALL])
@pytest.mark.parametrize("harm", [flip, cut, extend, remove, *ODD])
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
            assert {gone.end for gone in removed} == set(ENDS[index:])
            stats = cache.stats()
            reason = "missing" if harm is remove else "damaged"
            assert {gone.reason for gone in removed} == {reason}
            assert stats.total.removed == {reason: len(ENDS) - index}
            assert stats.total.damaged == 1
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


@pytest.mark.timeout(30)
@pytest.mark.parametrize("harm", [cut, extend, remove, *ODD])
def test_start_finds_files_that_do_not_fit_their_rows(root, harm):
    with open_cache(root) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, ENDS)
        ref = cache.path(ns, tip)[1].blobs[0]
    harm(root / "ns" / ns.id / ref.digest.hex())
    removed = []
    with open_cache(root, removed=removed) as cache:
        assert {gone.end for gone in removed} == set(ENDS[1:])
        reason = "missing" if harm is remove else "damaged"
        assert {gone.reason for gone in removed} == {reason}
        assert len(blob_files(root)) == 1
        assert position(cache, ns, TOKENS) == ENDS[0]
        check_account(cache, root)
        assert store(cache, ns, TOKENS, ENDS) == tip


@pytest.mark.parametrize("harm", ODD)
def test_a_stream_of_what_is_no_file_is_damage(cache, ns, root, harm):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]
    harm(root / "ns" / ns.id / first.digest.hex())
    with pytest.raises(DamagedError):
        cache.open_blob(ns, first)
    assert cache.stats().total.removed == {RemovalReason.DAMAGED: 3}


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO]
)
def test_what_cannot_be_opened_now_is_not_damage(cache, ns, root, monkeypatch, number):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]

    def refuse(*_args):
        raise OSError(number, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for call in (cache.read, cache.open_blob):
            with pytest.raises(StorageError):
                call(ns, first)
    assert not cache.stats().total.removed
    read_all(cache, ns, cache.path(ns, tip))


def test_damage_of_a_wide_subtree_is_told_for_every_node(root):
    removed = []
    with open_cache(root, 5 * MIB, removed) as cache:
        ns = space(cache)
        # More than one commit removes, on several branches below one node.
        assert cache._index.rows_per_removal < 10
        first = store(cache, ns, TOKENS, [10])
        for branch in range(3):
            tokens = [*TOKENS[:10], branch + 5000, *TOKENS]
            ends = range(20, 20 + 7 * (branch + 1), 7)
            store(cache, ns, tokens, list(ends), tip=first, start=10, size=600)
        cache.report_damage(ns, cache.path(ns, first)[0].blobs[0])
        assert sorted(gone.end for gone in removed) == [10, 20, 20, 20, 27, 27, 34]
        assert len({gone.key for gone in removed}) == 7
        assert {gone.reason for gone in removed} == {RemovalReason.DAMAGED}
        assert cache.stats().total.removed == {RemovalReason.DAMAGED: 7}
        check_account(cache, root)


@pytest.mark.parametrize("harm", [fifo, directory, listen, device])
def test_what_stands_where_a_blob_is_to_go_makes_place(cache, ns, root, harm):
    [segment] = segments(ns, TOKENS, [256])
    digest = blake3(b"".join(segment.blobs[BlobClass.KV])).digest()
    path = root / "ns" / ns.id / digest.hex()
    path.touch()
    harm(path)
    tip = store(cache, ns, TOKENS, [256])
    read_all(cache, ns, cache.path(ns, tip))
    check_account(cache, root)


def test_what_cannot_be_removed_stays_on_account_and_does_no_harm(root, monkeypatch):
    with open_cache(root) as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, ENDS)
        path = root / "ns" / ns.id / cache.path(ns, tip)[1].blobs[0].digest.hex()
        directory(path)
        orphan = root / "ns" / ns.id / "orphan"
        orphan.mkdir()
    real = os.rmdir

    def refuse(name, **where):
        if Path(name).name in (path.name, orphan.name):
            raise PermissionError(errno.EPERM, "injected")
        real(name, **where)

    monkeypatch.setattr(os, "rmdir", refuse)
    with open_cache(root) as cache:
        assert path.is_dir()
        assert position(cache, ns, TOKENS) == ENDS[0]
        assert walk(root) <= cache.stats().account.reserved
        store(cache, ns, [7, *TOKENS], ENDS)
        monkeypatch.undo()
        assert store(cache, ns, TOKENS, ENDS) == tip
    with open_cache(root) as cache:
        assert not orphan.exists()
        read_all(cache, ns, cache.path(ns, tip))
        check_account(cache, root)


def unlinked(path):
    shutil.rmtree(path)


def as_file(path):
    shutil.rmtree(path)
    path.write_bytes(b"no directory")


def as_link(path):
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def as_fifo(path):
    shutil.rmtree(path)
    os.mkfifo(path)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("harm", [unlinked, as_file, as_link, as_fifo])
def test_what_is_no_directory_in_a_namespace_s_place_goes(root, harm, closed):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        if not closed:
            harm(root / "ns" / ns.id)
            store(cache, ns, TOKENS, ENDS)
            assert cache.stats().total.removed == {RemovalReason.MISSING: 3}
            check_account(cache, root)
    if closed:
        harm(root / "ns" / ns.id)
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == (0 if closed else ENDS[-1])
        tip = store(cache, ns, TOKENS, ENDS)
        read_all(cache, ns, cache.path(ns, tip))
        check_account(cache, root)
    assert not (root / "ns" / ns.id).is_symlink()
    if harm is as_link:
        assert len(list((root.parent / "elsewhere").iterdir())) == 3


def test_damage_found_while_streaming_is_reported(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]
    flip(root / "ns" / ns.id / first.digest.hex())
    cache.report_damage(ns, first)
    cache.report_damage(ns, first)
    assert find(cache, ns, TOKENS) is None
    assert cache.stats().total.damaged == 1
    with pytest.raises(GoneError):
        cache.open_blob(ns, first)


def test_a_stream_of_a_blob_without_its_file_is_damage(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    first = cache.path(ns, tip)[0].blobs[0]
    (root / "ns" / ns.id / first.digest.hex()).unlink()
    with pytest.raises(DamagedError):
        cache.open_blob(ns, first)
    assert cache.stats().total.removed == {RemovalReason.MISSING: 3}


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
    assert stats.total.skipped == {"gone": 3}
    assert stats.leases == 0
    assert not blob_files(root)
    check_account(cache, root)


def test_b88_a_namespace_directory_that_was_removed_is_made_again(cache, ns, root):
    store(cache, ns, TOKENS, ENDS)
    chain = cache.chain(ns, find(cache, ns, TOKENS).tip, "test")
    shutil.rmtree(root / "ns" / ns.id)
    chain.append(*segments(ns, TOKENS, [800], start=700))
    cache.flush()
    assert chain.broken == "gone"
    assert find(cache, ns, TOKENS) is None
    tip = store(cache, ns, TOKENS, ENDS)
    read_all(cache, ns, cache.path(ns, tip))
    assert cache.stats().total.removed == {RemovalReason.MISSING: 3}
    chain.close()
    cache.flush()
    check_account(cache, root)


def test_b88_a_removed_directory_is_found_by_reads_too(cache, ns, root):
    tip = store(cache, ns, TOKENS, ENDS)
    shutil.rmtree(root / "ns" / ns.id)
    with pytest.raises(DamagedError):
        read_all(cache, ns, cache.path(ns, tip))
    assert find(cache, ns, TOKENS) is None
    store(cache, ns, TOKENS, ENDS)
    assert position(cache, ns, TOKENS) == 700
