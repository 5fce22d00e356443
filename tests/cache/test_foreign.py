"""What others put below the root: never written to, counted, and removed."""

import os
import sqlite3
import subprocess

import pytest
from structlog.testing import capture_logs

from kvport.manifest.limits import MIB
from kvport.snapshot.cache import companions, foreign
from kvport.snapshot.cache.directories import remove_tree
from kvport.snapshot.cache.regular import create, open_own, set_trailer
from kvport.snapshot.cache.root import claim
from kvport.snapshot.errors import StorageError
from tests.cache.builder import check_account, open_cache, position, space, store, walk

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"precious" * 300_000)
    return path


def link(victim, path):
    path.unlink(missing_ok=True)
    os.link(victim, path)


def soft(victim, path):
    path.unlink(missing_ok=True)
    path.symlink_to(victim)


def fifo(_, path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(_, path):
    path.unlink(missing_ok=True)
    (path / "deep").mkdir(parents=True)


PLANTS = pytest.mark.parametrize("plant", [link, soft, fifo, directory])


def filled(root):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
    return ns


@pytest.mark.timeout(30)
@PLANTS
@pytest.mark.parametrize(
    "name",
    [
        *(".probe", "ballast", "index.sqlite-suspect", "index.sqlite-mj0"),
        *(f"index.sqlite-{name}" for name in ("wal", "journal", "shm")),
    ],
)
def test_what_is_planted_in_a_file_s_place_harms_nothing(root, victim, plant, name):
    ns = filled(root)
    before = victim.read_bytes()
    plant(victim, root / name)
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == 700
        store(cache, ns, [7, *TOKENS], ENDS)
        cache.try_write()
        cache.administration.gc()
        check_account(cache, root)
        assert not cache.stats().index_resets
    with open_cache(root) as cache:
        assert position(cache, ns, [7, *TOKENS]) == 700
        check_account(cache, root)
    assert victim.read_bytes() == before


@pytest.mark.timeout(30)
@PLANTS
def test_a_byte_is_written_to_a_new_file_only(root, victim, plant):
    before = victim.read_bytes()
    with open_cache(root) as cache:
        plant(victim, root / ".probe")
        cache.try_write()
        assert {path.name for path in root.glob(".probe*")} == {".probe"}
    assert victim.read_bytes() == before
    claim(root, None).release()


@pytest.mark.parametrize("plant", [link, soft])
def test_an_index_found_corrupt_is_marked_by_a_new_file_only(root, victim, plant):
    filled(root)
    index = root / "index.sqlite"
    victim.unlink()
    if plant is soft:
        plant(victim, root / "index.sqlite-suspect")
    companions.suspect(index)
    assert companions.is_suspect(index)
    assert not victim.exists()


def test_an_index_that_has_another_name_is_copied(root, tmp_path):
    """As in a backup that is made of links: the other name's file stays as it is."""
    ns = filled(root)
    os.link(root / "index.sqlite", tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == 700
        store(cache, ns, [7, *TOKENS], ENDS)
        check_account(cache, root)
    assert (tmp_path / "backup").read_bytes() == before


def test_another_s_database_in_the_index_s_place_is_not_changed(root, tmp_path):
    filled(root)
    theirs = tmp_path / "theirs.sqlite"
    other = sqlite3.connect(theirs)
    other.execute("CREATE TABLE t (a)")
    other.close()
    before = theirs.read_bytes()
    link(theirs, root / "index.sqlite")
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 1
        check_account(cache, root)
    assert theirs.read_bytes() == before


def test_no_journal_is_played_back(root, victim):
    """It would name a file that SQLite removes when it has played it back."""
    ns = filled(root)
    name = os.fsencode(victim)
    (root / "index.sqlite-journal").write_bytes(
        bytes.fromhex("d9d505f920a163d7")
        + (0).to_bytes(4)
        + bytes(4)
        + ((root / "index.sqlite").stat().st_size // 4096).to_bytes(4)
        + (512).to_bytes(4)
        + (4096).to_bytes(4)
        + bytes(484)
        + (2**20 // 4096 + 262_144).to_bytes(4)
        + name
        + len(name).to_bytes(4)
        + sum(name).to_bytes(4)
        + bytes.fromhex("d9d505f920a163d7")
    )
    with open_cache(root) as cache:
        assert position(cache, ns, TOKENS) == 700
        assert not os.path.lexists(root / "index.sqlite-journal")
        check_account(cache, root)
    assert victim.exists()


def test_a_log_that_a_crash_left_is_kept(root):
    cache = open_cache(root)
    store(cache, space(cache), TOKENS, ENDS)
    log = (root / "index.sqlite-wal").read_bytes()
    index = (root / "index.sqlite").read_bytes()
    assert log
    cache.close()
    (root / "index.sqlite").write_bytes(index)
    (root / "index.sqlite-wal").write_bytes(log)
    with open_cache(root) as cache:
        assert position(cache, space(cache), TOKENS) == 700


def test_what_comes_while_the_index_is_opened_is_found(root, victim):
    filled(root)
    link(victim, root / "index.sqlite-wal")
    with pytest.raises(StorageError):
        companions.check_fit(root / "index.sqlite")


@PLANTS
def test_a_staged_file_s_place_is_not_written_to(root, victim, plant):
    before = victim.read_bytes()
    (root / "staging").mkdir(parents=True)
    path = root / "staging" / "file"
    plant(victim, path)
    with pytest.raises(OSError, match="not a file of ours"):
        open_own(root, path)
    with pytest.raises(OSError, match="not a file of ours"):
        set_trailer(root, path, 3, b"trailer")
    with pytest.raises(FileExistsError):
        create(root, path)
    assert victim.read_bytes() == before


def test_an_upload_s_directory_that_became_a_link_takes_no_file(root, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (root / "staging").mkdir(parents=True)
    (root / "staging" / "upload").symlink_to(theirs)
    with pytest.raises(NotADirectoryError):
        create(root, root / "staging" / "upload" / "file")
    assert not list(theirs.iterdir())


def plant_all(root, size):
    """Files and directories of nobody, in each place; answers their bytes."""
    before = walk(root)
    (root / "foo.bin").write_bytes(bytes(range(256)) * (size // 256))
    (root / "index.sqlite-more").write_bytes(b"x" * 5000)
    (root / "more" / "deep").mkdir(parents=True)
    (root / "more" / "deep" / "x").write_bytes(b"x" * 70_000)
    (root / "ns" / "zzz").mkdir()
    (root / "ns" / "zzz" / "q").write_bytes(b"x" * 100_000)
    (root / "ns" / "file").write_bytes(b"x" * 50_000)
    (root / "staging" / "up").mkdir()
    (root / "staging" / "up" / "x").write_bytes(b"x" * 30_000)
    return walk(root) - before


def test_foreign_files_are_counted_and_gc_removes_them(root, victim):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        more = plant_all(root, MIB)
        (root / "link").symlink_to(victim.parent)
        cache.administration.tick()
        check_account(cache, root)
        stats = cache.stats()
        held = sum(one.nbytes for one in stats.namespaces)
        assert held + sum(stats.beside.values()) == stats.total_bytes
        with capture_logs() as logs:
            assert cache.administration.gc().nbytes >= more - 8192
        (line,) = [one for one in logs if one["event"] == "cache_foreign_files"]
        assert set(line["names"]) == {"foo.bin", "index.sqlite-more", "link", "more"}
        check_account(cache, root)
        assert position(cache, ns, TOKENS) == 700
        assert [path.name for path in (root / "ns").iterdir()] == [ns.id]
        assert not {"foo.bin", "index.sqlite-more", "link", "more"} & {
            path.name for path in root.iterdir()
        }
        assert cache.full is None
    assert victim.exists()


def test_a_start_removes_foreign_files_and_no_state_for_them(root, victim):
    with open_cache(root, 16 * MIB) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
    plant_all(root, 20 * MIB)
    (root / "link").symlink_to(victim.parent)
    with capture_logs() as logs, open_cache(root, 16 * MIB) as cache:
        assert position(cache, ns, TOKENS) == 700
        assert not cache.stats().total.removed
        check_account(cache, root)
    assert any("foo.bin" in one.get("names", ()) for one in logs)
    assert victim.exists()


def test_nothing_is_evicted_for_what_eviction_cannot_make_good(root):
    with open_cache(root, 16 * MIB) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        plant_all(root, 20 * MIB)
        cache.administration.tick()
        assert position(cache, ns, TOKENS) == 700
        plan = cache.administration.plan()
        assert not plan.rows
        assert plan.missing
        assert not plan.in_use
        assert "that are not its own" in cache.full.reason
        assert cache.stats().total_bytes == walk(root)
        cache.administration.gc()
        cache.administration.tick()
        assert cache.full is None
        assert position(cache, ns, TOKENS) == 700
        check_account(cache, root)


def test_state_goes_for_foreign_files_as_far_as_that_keeps_the_cap(root):
    with open_cache(root, 16 * MIB) as cache:
        ns = space(cache)
        for number in range(20):
            store(cache, ns, [number, *TOKENS], [300], size=100_000)
        (root / "foo.bin").write_bytes(b"x" * (14 * MIB))
        cache.administration.tick()
        check_account(cache, root)
        there = sum(position(cache, ns, [n, *TOKENS]) > 0 for n in range(20))
        assert 0 < there < 20


def test_what_systems_keep_at_the_top_of_a_volume_stays(root, monkeypatch):
    with open_cache(root) as cache:
        store(cache, space(cache), TOKENS, ENDS)
    for name in (".Trashes", ".Trash-1000", ".Spotlight-V100"):
        (root / name).mkdir()
        (root / name / "deleted").write_bytes(b"x" * 9000)
    (root / ".DS_Store").write_bytes(b"x")
    real = os.path.ismount
    monkeypatch.setattr(
        foreign.os.path, "ismount", lambda path: path == root or real(path)
    )
    with open_cache(root) as cache:
        cache.administration.gc()
        check_account(cache, root)
        assert len(list(root.glob(".Tr*/deleted"))) == 2
        assert not (root / ".DS_Store").exists()
    monkeypatch.undo()
    with open_cache(root) as cache:
        assert not list(root.glob(".*"))
        check_account(cache, root)


def test_a_tree_of_any_depth_goes(root):
    filled(root)
    top = root / "deep"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    try:
        with open_cache(root) as cache:
            assert not top.exists()
            check_account(cache, root)
            assert position(cache, space(cache), TOKENS) == 700
    finally:
        # What is left of it would end whoever removes the test's directory.
        subprocess.run(["rm", "-rf", str(top)], check=True)


def test_a_tree_with_another_volume_in_it_stays(root, monkeypatch):
    theirs = root / "tree" / "mounted"
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("all of it")
    number, real = theirs.stat().st_ino, os.fstat

    def elsewhere(fd):
        found = list(real(fd))
        found[2] += found[1] == number
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", elsewhere)
    with pytest.raises(OSError, match="another volume"):
        remove_tree(root / "tree")
    assert (theirs / "thesis.txt").read_text() == "all of it"
