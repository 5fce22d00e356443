"""Volumes that are missing, go, come back, are replaced, full, read-only or fail."""

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.errors import (
    CacheAbsentError,
    CacheInUseError,
    CapacityError,
    ForeignRootError,
    MissingRootError,
    StorageError,
)
from kvport.snapshot.volume import Volume, VolumeState
from tests.cache.builder import (
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
from tests.cache.volume import fill, mounted, read_only, simulate

TOKENS = list(range(1000))
ENDS = [256, 512, 700]
INTERVAL = 0.02


@pytest.fixture
def home(tmp_path):
    """What stands for the volume's mount point; the root is in it."""
    path = tmp_path / "volume"
    path.mkdir()
    return path


@pytest.fixture
def away(tmp_path):
    return tmp_path / "elsewhere"


def filled(root: Path) -> str:
    with open_cache(root) as cache:
        store(cache, space(cache), TOKENS, ENDS)
        return cache.root_id


def at(root: Path, expected: str | None = None, cap: int = 64 * MIB) -> Opening:
    return Opening(root=root, free_floor=0, cap_bytes=cap, expected_root=expected)


@contextlib.contextmanager
def opened(root: Path, expected: str | None = None, **options):
    volume = Volume.open(at(root, expected, **options), (space,), INTERVAL)
    try:
        yield volume
    finally:
        volume.close()


def until(volume: Volume, state: VolumeState) -> None:
    end = time.monotonic() + 20
    while volume.status.state is not state:
        assert time.monotonic() < end, volume.status
        time.sleep(0.005)


def snapshot(path: Path) -> dict[str, tuple]:
    """All that is below a path, to see whether anything was touched."""
    return {
        str(one.relative_to(path)): (
            one.lstat().st_ino,
            one.lstat().st_mtime_ns,
            one.read_bytes() if one.is_file() else b"",
        )
        for one in (path, *path.rglob("*"))
    }


def restores(volume: Volume, root: Path) -> None:
    cache = volume.cache
    ns = space(cache)
    assert position(cache, ns, TOKENS) == 700
    assert len(read_all(cache, ns, find(cache, ns, TOKENS).nodes)) == 3
    check_account(cache, root)


def test_b26_a_volume_that_is_absent_at_start_is_picked_up_later(home, away):
    root = home / "cache"
    name = filled(root)
    home.rename(away)
    home.mkdir()  # a mount point without its volume
    with opened(root, name) as volume:
        assert volume.status.state is VolumeState.ABSENT
        with pytest.raises(CacheAbsentError, match="missing"):
            _ = volume.cache
        time.sleep(5 * INTERVAL)
        assert not list(home.iterdir())
        home.rmdir()
        away.rename(home)
        until(volume, VolumeState.OK)
        assert not volume.status.reason
        restores(volume, root)


def test_a_root_that_is_a_mount_point_is_absent_while_it_is_empty(home, away):
    name = filled(home)
    home.rename(away)
    home.mkdir()
    with opened(home, name) as volume:
        assert volume.status.state is VolumeState.ABSENT
        time.sleep(5 * INTERVAL)
        assert not list(home.iterdir())


def test_a_volume_that_goes_and_comes_back_while_running(home, away):
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        chain = cache.chain(ns, ROOT_NODE, "test")
        one, two, three = segments(ns, [7, *TOKENS], ENDS)
        chain.append(one)
        cache.flush()
        home.rename(away)
        chain.append(two)
        until(volume, VolumeState.ABSENT)
        chain.append(three)
        chain.close()
        assert chain.broken == "absent"
        with pytest.raises(CacheAbsentError):
            find(cache, ns, TOKENS)
        with pytest.raises(StorageError):
            cache.read(ns, find_ref(cache, ns))
        assert not home.exists()
        since = volume.status.since
        time.sleep(3 * INTERVAL)
        assert volume.status.since == since
        away.rename(home)
        until(volume, VolumeState.OK)
        restores(volume, root)
        again = volume.cache
        assert again is not cache
        assert position(again, ns, [7, *TOKENS]) == 256
        # Counted across the loss.
        assert again.stats().total.skipped == {"absent": 2}
        store(again, ns, [7, *TOKENS], ENDS)
        check_account(again, root)


def find_ref(cache, ns):
    """A blob as it was known before its volume went."""
    [segment] = segments(ns, TOKENS, [256])
    from blake3 import blake3

    from kvport.manifest.digests import BlobDigest
    from kvport.manifest.layout import BlobClass
    from kvport.snapshot.cache.records import BlobRef

    data = b"".join(bytes(part) for part in segment.blobs[BlobClass.KV])
    return BlobRef(BlobClass.KV, BlobDigest(blake3(data).digest()), len(data))


def test_what_took_the_roots_place_is_not_touched(home, away, tmp_path):
    root, other = home / "cache", tmp_path / "other"
    filled(other)
    (other / "index.sqlite-wal").write_bytes(b"the log of a crashed owner")
    (other / "ballast").unlink()
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        cache._index.touch(1)
        root.rename(away)
        other.rename(root)
        before = snapshot(root)
        until(volume, VolumeState.REPLACED)
        time.sleep(5 * INTERVAL)
        assert snapshot(root) == before
        root.rename(other)
        away.rename(root)
        until(volume, VolumeState.OK)
        restores(volume, root)


def test_no_change_reaches_what_took_the_roots_place(root, away, tmp_path):
    """Without a monitor: each way to change something sees for itself."""
    other = tmp_path / "other"
    filled(other)
    (other / "staging" / "upload").mkdir()
    cache = open_cache(root)
    ns = space(cache)
    tip = store(cache, ns, TOKENS, ENDS)
    cache.staging("upload")
    root.rename(away)
    other.rename(root)
    before = snapshot(root)
    chain = cache.chain(ns, ROOT_NODE, "test")
    for segment in segments(ns, [7, *TOKENS], ENDS):
        chain.append(segment)
    chain.close()
    cache.flush()
    assert chain.broken == "absent"
    changes = [
        lambda: cache.report_damage(ns, cache.path(ns, tip)[0].blobs[0]),
        lambda: cache.staging("another"),
        lambda: cache.discard_staging("upload"),
        lambda: cache.admit(ns, (), {}, cache.reserve(1000)),
        lambda: cache._evictor.free(1),
        cache._evictor.unlink_doomed,
        cache._evictor._drop_ballast,
    ]
    for change in changes:
        with pytest.raises(CacheAbsentError):
            change()
    cache.close()
    assert snapshot(root) == before
    shutil.rmtree(root)
    away.rename(root)
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == 700
        check_account(cache, root)


def test_a_log_that_sqlite_would_take_for_its_own_stays(root, away, tmp_path):
    """Files of another volume may have the numbers of ours: SQLite asks no more."""
    other = tmp_path / "other"
    filled(other)
    cache = open_cache(root)
    store(cache, space(cache), TOKENS, ENDS)
    root.rename(away)
    other.rename(root)
    log = root / "index.sqlite-wal"
    log.write_bytes(b"the log of a crashed owner")
    # A file keeps its number where it is linked: the very file, on "another volume".
    (root / "index.sqlite").unlink()
    os.link(away / "index.sqlite", root / "index.sqlite")
    found = list(cache._index._place)
    found[2] += 1
    cache._index._place = os.stat_result(found)
    cache.close()
    assert log.read_bytes() == b"the log of a crashed owner"


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_an_index_that_is_taken_away_is_noticed_and_opened_anew(
    home, away, name, replaced
):
    """Removed by somebody, or restored from a backup, under a running server."""
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        (root / name).rename(away)
        if replaced:
            (root / name).write_bytes(away.read_bytes())
        volume.suspect()
        end = time.monotonic() + 20
        while volume._cache in {cache, None}:
            assert time.monotonic() < end, volume.status
            time.sleep(0.005)
        again = volume.cache
        ns = space(again)
        assert volume.status.state is VolumeState.OK
        # An index without its log's last commits may have none of it, or all.
        lost = again.stats().index_resets
        assert lost == 1 or position(again, ns, TOKENS) in {0, 700}
        if name == "index.sqlite" and not replaced:
            assert lost == 1
        store(again, ns, TOKENS, ENDS)
        restores(volume, root)


def test_without_its_index_an_open_cache_says_so_and_counts_on(root, away):
    cache = open_cache(root, 16 * MIB)
    ns = space(cache)
    store(cache, ns, TOKENS, ENDS)
    (root / "index.sqlite").rename(away)
    for work in (cache.verify, cache.administration.plan, cache.administration.settle):
        with contextlib.suppress(StorageError):
            work()
    with pytest.raises(StorageError, match="took its place"):
        cache.verify()
    for n in range(60):
        with contextlib.suppress(AssertionError):
            # What is committed has its files; or it was not committed.
            store(cache, ns, [n, *TOKENS[1:]], ENDS, size=200_000, variant=n)
        with contextlib.suppress(StorageError):
            position(cache, ns, TOKENS)
        numbers = cache.stats()
        assert 0 <= numbers.account.used_percent <= 100
        assert numbers.account.reserved >= walk(root)
        assert min(numbers.beside.values()) >= 0
    ((rows,),) = cache._index.all("SELECT count(*) FROM file WHERE live")
    assert rows == len(blob_files(root))
    cache.close()


def test_a_root_that_is_read_only_is_used_again_when_it_is_not(home, monkeypatch):
    root = home / "cache"
    with opened(root) as volume:
        ns = space(volume.cache)
        store(volume.cache, ns, TOKENS, ENDS)
        with read_only(root, monkeypatch):
            until(volume, VolumeState.READ_ONLY)
            with pytest.raises(CacheAbsentError, match="read-only"):
                _ = volume.cache
        until(volume, VolumeState.OK)
        restores(volume, root)


def test_b26_a_root_that_is_read_only_at_start_is_no_reason_not_to(home, monkeypatch):
    root = home / "cache"
    name = filled(root)
    with read_only(root, monkeypatch), opened(root, name) as volume:
        assert volume.status.state is VolumeState.READ_ONLY
    with opened(root, name) as volume:
        restores(volume, root)


def test_a_full_volume_keeps_its_cache_and_says_so(home, monkeypatch):
    with mounted(home) as real:
        if not real:
            simulate(home, monkeypatch)
            statvfs = os.statvfs
            monkeypatch.setattr(os, "statvfs", lambda p: with_flag(statvfs(p)))
        root = home / "cache"
        with opened(root, cap=8 * MIB) as volume:
            cache = volume.cache
            ns = space(cache)
            tip = store(cache, ns, TOKENS, ENDS, size=300_000)
            with cache.lease(ns, tip, "test"):
                neighbour = fill(home)
                chain = cache.chain(ns, ROOT_NODE, "test")
                for segment in segments(ns, [7, *TOKENS], ENDS, size=300_000):
                    chain.append(segment)
                chain.close()
                cache.flush()
                assert chain.broken == "disk_full"
                until(volume, VolumeState.FULL)
                time.sleep(3 * INTERVAL)
                assert volume.cache is cache
                restores(volume, root)
                neighbour.unlink()
                store(cache, ns, [8, *TOKENS], [100])
                assert volume.status.state is VolumeState.OK
            check_account(cache, root)


def with_flag(found):
    found.f_flag = 0
    return found


def test_a_volume_that_fails_is_tried_again(home, monkeypatch):
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)

        def failing(_fd):
            raise OSError(errno.EIO, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, [7, *TOKENS], ENDS):
                chain.append(segment)
            chain.close()
            until(volume, VolumeState.FAILED)
            assert chain.broken == "storage"
        until(volume, VolumeState.OK)
        restores(volume, root)
        assert volume.cache.stats().total.skipped == {"storage": 3}


def test_one_batch_that_fails_does_not_cost_the_cache(home, monkeypatch):
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        real, failed = os.writev, []

        def once(fd, parts):
            if not failed:
                failed.append(fd)
                raise OSError(errno.EIO, "injected")
            return real(fd, parts)

        monkeypatch.setattr(os, "writev", once)
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, TOKENS, ENDS):
            chain.append(segment)
        chain.close()
        cache.flush()
        assert chain.broken == "storage"
        time.sleep(3 * INTERVAL)
        assert volume.cache is cache
        store(cache, ns, TOKENS, ENDS)
        restores(volume, root)


def test_what_is_wrong_with_the_setting_is_fatal_at_start(home, tmp_path):
    with pytest.raises(MissingRootError):
        Volume.open(at(tmp_path / "no" / "such" / "place"))
    (home / "thesis.tex").write_text("all of it")
    with pytest.raises(ForeignRootError):
        Volume.open(at(home))
    with pytest.raises(ForeignRootError):
        Volume.open(at(home / "thesis.tex"))
    with pytest.raises(CapacityError):
        Volume.open(at(tmp_path / "small", cap=MIB))
    with open_cache(tmp_path / "taken"), pytest.raises(CacheInUseError):
        Volume.open(at(tmp_path / "taken"))


def test_a_root_with_another_owner_is_taken_once_that_has_ended(home, away):
    root = home / "cache"
    name = filled(root)
    home.rename(away)
    with opened(root, name) as volume:
        with open_cache(away / "cache"):
            away.rename(home)
            until(volume, VolumeState.FAILED)
            assert "owner" in volume.status.reason
        until(volume, VolumeState.OK)
        restores(volume, root)


def test_b88_a_root_that_is_deleted_is_not_made_again(home):
    root = home / "cache"
    with opened(root) as volume:
        store(volume.cache, space(volume.cache), TOKENS, ENDS)
        shutil.rmtree(root)
        until(volume, VolumeState.ABSENT)
        time.sleep(5 * INTERVAL)
        assert not root.exists()


def test_a_root_of_the_same_name_is_the_same_wherever_it_was(home, tmp_path):
    """As a volume that was mounted again: another device, the same root."""
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        store(cache, space(cache), TOKENS, ENDS)
        cache._index.checkpoint()
        root.rename(tmp_path / "old")
        shutil.copytree(tmp_path / "old", root)
        end = time.monotonic() + 20
        while volume.status.state is not VolumeState.OK or volume.cache is cache:
            assert time.monotonic() < end
            time.sleep(0.005)
        restores(volume, root)


def test_what_is_arranged_is_done_on_every_cache(home, away):
    root, seen = home / "cache", []
    with opened(root) as volume:
        end = volume.arrange(seen.append)
        assert seen == [volume.cache]
        home.rename(away)
        until(volume, VolumeState.ABSENT)
        away.rename(home)
        until(volume, VolumeState.OK)
        assert seen[1:] == [volume.cache]
        end()
        home.rename(away)
        until(volume, VolumeState.ABSENT)
        away.rename(home)
        until(volume, VolumeState.OK)
        assert len(seen) == 2

        def refused(_cache):
            raise CapacityError("no room")

        with pytest.raises(CapacityError):
            volume.arrange(refused)
        assert volume.status.state is VolumeState.OK


class Hung:
    """A volume on which writing hangs until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        real = os.writev

        def write(fd, parts):
            self.entered.set()
            assert self.leave.wait(60)
            return real(fd, parts)

        patch.setattr(os, "writev", write)


@pytest.fixture
def hung(monkeypatch):
    hung = Hung(monkeypatch)
    yield hung
    hung.leave.set()


def hang(cache: Cache, hung: Hung):
    """A chain whose first segment hangs on its way, and whose others wait."""
    ns = space(cache)
    chain = cache.chain(ns, ROOT_NODE, "test")
    one, two, three = segments(ns, TOKENS, ENDS)
    chain.append(one)
    assert hung.entered.wait(20)
    chain.append(two)
    return chain, three


def released(root: Path) -> Cache:
    """The cache, opened again as soon as its last owner has let go."""
    end = time.monotonic() + 20
    while True:
        try:
            return open_cache(root)
        except CacheInUseError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_closing_does_not_wait_for_a_volume_that_hangs(root, hung):
    cache = open_cache(root)
    cache._writer._patience = 0.2
    chain, three = hang(cache, hung)
    began = time.monotonic()
    cache.close()
    assert 0.2 <= time.monotonic() - began < 10
    assert chain.broken == "deadline"
    chain.append(three)
    chain.close()
    assert cache.stats().total.skipped == {"deadline": 3}
    with pytest.raises(CacheAbsentError):
        cache.flush()
    # Something may yet be written: the root is ours until then.
    with pytest.raises(CacheInUseError):
        open_cache(root)
    hung.leave.set()
    with released(root) as cache:
        assert position(cache, space(cache), TOKENS) == 256
        check_account(cache, root)


def test_a_volume_that_hangs_is_given_up_while_running(root, hung):
    with opened(root) as volume:
        cache = volume.cache
        cache._writer._patience = 0.2
        cache._writer._queue_bytes = 1
        chain, three = hang_full(cache, hung)
        until(volume, VolumeState.FAILED)
        three.join(20)
        assert not three.is_alive()
        assert chain.broken == "absent"
        hung.leave.set()
        until(volume, VolumeState.OK)
        cache = volume.cache
        store(cache, space(cache), TOKENS, ENDS)
        restores(volume, root)


def hang_full(cache: Cache, hung: Hung):
    """The same, with a request that waits for room in the queue."""
    ns = space(cache)
    chain = cache.chain(ns, ROOT_NODE, "test")
    one, two, _ = segments(ns, TOKENS, ENDS)
    chain.append(one)
    assert hung.entered.wait(20)
    waiting = threading.Thread(target=chain.append, args=(two,))
    waiting.start()
    return chain, waiting


def test_a_directory_that_goes_during_a_batch_leaves_no_orphan(home, away, monkeypatch):
    root = home / "cache"
    with opened(root) as volume:
        cache = volume.cache
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        before = blob_files(root)
        real = os.fsync

        def go_away(fd):
            if home.exists():
                home.rename(away)
            return real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", go_away)
            chain = cache.chain(ns, ROOT_NODE, "test")
            for segment in segments(ns, [7, *TOKENS], ENDS):
                chain.append(segment)
            chain.close()
            with contextlib.suppress(CacheAbsentError):
                cache.flush()
        # Back at once, perhaps before the monitor saw it.
        away.rename(home)
        end = time.monotonic() + 20
        while volume.status.state is not VolumeState.OK or volume.cache is cache:
            assert time.monotonic() < end
            time.sleep(0.005)
        # None of the batch is there, or all of it if the volume was back in time.
        assert len(blob_files(root) - before) in {0, 3}
        [numbers] = volume.cache.stats().namespaces
        assert len(blob_files(root)) == numbers.files
        restores(volume, root)


def test_a_volume_that_is_off_has_no_cache():
    volume = Volume.off()
    assert volume.status.state is VolumeState.OFF
    with pytest.raises(CacheAbsentError, match="off"):
        _ = volume.cache
    volume.close()
