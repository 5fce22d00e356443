"""Whose root it is, what is swept at start, what a lost index means."""

import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvport.snapshot.errors import (
    CacheInUseError,
    ForeignRootError,
    MissingRootError,
    StorageError,
)
from tests.cache.builder import (
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    space,
    store,
    walk,
)

TOKENS = list(range(1000))


def filled(root: Path) -> str:
    """A root with one path of three segments; answers its id."""
    with open_cache(root) as cache:
        store(cache, space(cache), TOKENS, [256, 512, 700])
        return cache.root_id


def test_only_its_owner_can_read_a_root(root):
    filled(root)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path.name


def test_no_shared_memory_file_and_no_log_is_left(root):
    filled(root)
    with open_cache(root):
        assert not list(root.glob("*-shm"))
    assert {path.name for path in root.iterdir()} == {
        "root.json", "index.sqlite", "ns", "staging", "ballast",
    }  # fmt: skip


def test_a_root_without_its_parent_is_not_made(tmp_path):
    with pytest.raises(MissingRootError):
        open_cache(tmp_path / "unmounted" / "cache")
    assert not list(tmp_path.iterdir())


def test_an_expected_root_is_not_made_anew(root, tmp_path):
    def expecting(name, at=root):
        return open_cache(at, None, expected_root=name)

    with pytest.raises(MissingRootError):
        expecting("a" * 32)
    assert not root.exists()
    name = filled(root)
    with expecting(name) as cache:
        assert cache.root_id == name
    with pytest.raises(MissingRootError):
        expecting("a" * 32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingRootError):
        expecting(name, tmp_path / "empty")


def test_a_directory_with_other_things_is_not_taken_over(root):
    root.mkdir()
    (root / "thesis.tex").write_text("all of it")
    with pytest.raises(ForeignRootError):
        open_cache(root)
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]


FOREIGN = [
    "",
    "{}",
    "[]",
    "null",
    '"format"',
    "\xff",
    '{"format":9,"id":"aa"}',
    '{"format":true,"id":"aa"}',
    '{"format":1.0,"id":"aa"}',
    '{"format":[1],"id":"aa"}',
    '{"format":2,"id":""}',
    '{"format":2,"id":7}',
    '{"format":2,"id":"\'); DROP"}',
    '{"format":2,"id":"' + "a" * 100 + '"}',
    '{"format":2,"id":"aa"}' + " " * 100_000 + "x",
    "[" * 100_000,
    '{"format":' * 100_000,
    "9" * 10_000,
]


@pytest.mark.parametrize("text", FOREIGN, ids=range(len(FOREIGN)))
def test_a_root_of_another_format_is_left_alone(root, text):
    filled(root)
    (root / "root.json").write_text(text, encoding="latin-1")
    before = blob_files(root)
    with pytest.raises(ForeignRootError):
        open_cache(root)
    assert blob_files(root) == before


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "harm", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("x")]
)
def test_what_is_no_file_in_root_json_s_place_is_foreign(root, harm):
    filled(root)
    (root / "root.json").unlink()
    harm(root / "root.json")
    with pytest.raises(ForeignRootError):
        open_cache(root)
    assert len(blob_files(root)) == 3


def test_two_owners_in_one_process_are_refused(root):
    with open_cache(root), pytest.raises(CacheInUseError):
        open_cache(root)
    open_cache(root).close()


def test_two_owners_in_two_processes_are_refused(root):
    code = (
        "import sys, pathlib\n"
        "from kvport.snapshot.cache.cache import Cache, Opening\n"
        "from kvport.manifest.errors import KvportError\n"
        "try: Cache.open(Opening(root=pathlib.Path(sys.argv[1])))\n"
        "except KvportError as error: print(error.code)\n"
    )
    with open_cache(root):
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert done.stdout == "cache_in_use\n"


def lose(index: Path) -> None:
    index.unlink()


def scribble(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[4096:12288] = b"\xa5" * 8192
    index.write_bytes(data)


def cut(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:5000])


def exchange(index: Path) -> None:
    other = index.parent.parent / "other"
    filled(other)
    index.write_bytes((other / "index.sqlite").read_bytes())


def empty(index: Path) -> None:
    index.write_bytes(b"")


def as_directory(index: Path) -> None:
    index.unlink()
    (index / "deep").mkdir(parents=True)


def as_fifo(index: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def as_link(index: Path) -> None:
    index.rename(index.parent.parent / "elsewhere")
    index.symlink_to(index.parent.parent / "elsewhere")


def alter(*statements: str):
    def harm(index: Path) -> None:
        with contextlib.closing(sqlite3.connect(index)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return harm


ALTERED = [
    *(alter(f"DROP TABLE {name}") for name in ("ns", "node", "file", "blob", "attest")),
    alter("DROP TABLE root"),
    alter("DROP TABLE numerics"),
    alter("DROP INDEX node_whole"),
    alter("DROP INDEX node_leaf", "CREATE INDEX node_leaf ON node (used)"),
    alter("ALTER TABLE node RENAME COLUMN kinds TO kind"),
    alter("ALTER TABLE file ADD COLUMN more TEXT"),
    alter("CREATE TABLE stranger (a)"),
    alter("CREATE TRIGGER t AFTER DELETE ON node BEGIN DELETE FROM file; END"),
    alter("PRAGMA user_version=7"),
    alter("UPDATE root SET format = 9"),
    alter("UPDATE root SET id = CAST(x'ff' AS TEXT)"),
    alter("DELETE FROM root"),
    alter("INSERT INTO root SELECT * FROM root"),
]
LOST = [lose, scribble, cut, exchange, empty, as_directory, as_fifo, as_link]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("harm", [*LOST, *ALTERED])
def test_a_lost_index_empties_the_cache_and_says_so(root, harm):
    name = filled(root)
    harm(root / "index.sqlite")
    with open_cache(root) as cache:
        assert cache.root_id == name
        assert cache.stats().index_resets == 1
        assert not blob_files(root)
        ns = space(cache)
        assert find(cache, ns, TOKENS) is None
        check_account(cache, root)
        store(cache, ns, TOKENS, [256])
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 0
        assert position(cache, ns, TOKENS) == 256


def test_closing_twice_is_closing_once(root):
    cache = open_cache(root)
    store(cache, space(cache), TOKENS, [256])
    cache.close()
    cache.close()
    with open_cache(root) as again:
        cache.close()
        # Still owned by the second.
        with pytest.raises(CacheInUseError):
            open_cache(root)
        assert position(again, space(again), TOKENS) == 256


def test_a_failure_at_the_end_gives_the_root_up(root):
    cache = open_cache(root)
    store(cache, space(cache), TOKENS, [256])
    cache._index.touch(1)
    cache._index._connection.close()
    cache.close()
    with open_cache(root) as again:
        assert position(again, space(again), TOKENS) == 256


def test_an_index_that_someone_else_has_open_is_not_taken_for_lost(root):
    filled(root)
    before = blob_files(root)
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError):
            open_cache(root)
    assert blob_files(root) == before
    with open_cache(root) as cache:
        assert cache.stats().index_resets == 0
        assert position(cache, space(cache), TOKENS) == 700


def test_a_root_that_was_copied_to_another_volume_is_measured_again(root):
    filled(root)
    with open_cache(root) as cache, cache._index.transaction():
        # As on a file system with larger blocks.
        cache._index.all("UPDATE file SET alloc = alloc + 16384")
    with open_cache(root) as cache:
        check_account(cache, root)
        assert position(cache, space(cache), TOKENS) == 700


def test_start_sweeps_orphans_and_uploads(root):
    filled(root)
    with open_cache(root) as cache:
        ns = space(cache)
        (cache.staging("upload-1") / "blob").write_bytes(b"x" * 9000)
    kept = blob_files(root)
    directory = root / "ns" / ns.id
    (directory / ("ab" * 32)).write_bytes(b"no row")
    (directory / ("ab" * 32 + ".1234abcd")).write_bytes(b"half written")
    (directory / "odd").mkdir()
    (root / "ns" / "stranger").mkdir()
    (root / "ns" / "stranger" / "file").write_bytes(b"no namespace")
    with open_cache(root) as cache:
        assert blob_files(root) == kept
        assert not list((root / "staging").iterdir())
        assert [path.name for path in (root / "ns").iterdir()] == [ns.id]
        check_account(cache, root)
        read_all(cache, ns, find(cache, ns, TOKENS).nodes)


def test_start_finishes_a_removal_that_was_cut_short(root):
    filled(root)
    with open_cache(root) as cache:
        ns = space(cache)
        node = find(cache, ns, TOKENS).nodes[-1]
        # As a crash after the first commit of a removal leaves it.
        with cache._index.transaction():
            cache._index.remove([cache._index.find(1, node.id)])
        assert len(blob_files(root)) == 3
    with open_cache(root) as cache:
        assert len(blob_files(root)) == 2
        assert position(cache, ns, TOKENS) == 512
        check_account(cache, root)


def test_opening_an_idle_root_changes_nothing(root):
    filled(root)
    with open_cache(root) as cache:
        before = walk(root)
        assert cache.stats().account.reserved == before
    tree = {path: path.stat().st_size for path in root.rglob("*")}
    open_cache(root).close()
    assert {path: path.stat().st_size for path in root.rglob("*")} == tree


def test_names_are_the_same_in_every_process(root):
    code = (
        "import json, pathlib, sys\n"
        "from tests.cache.builder import *\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "with open_cache(root) as cache:\n"
        "    ns = space(cache, ALL)\n"
        "    tip = store(cache, ns, list(range(600)), [256, 512, 600],\n"
        "        kinds={600: set(PointKind)}, provenance=claim(origins=[ME, OTHER]))\n"
        "    written = sum(cache.stats().total.written.values())\n"
        "    print(json.dumps([ns.id, tip.hex(), written]))\n"
    )
    answers = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code, str(root)],
                capture_output=True, text=True, check=True,
                cwd=Path(__file__).parents[2], env={"PYTHONHASHSEED": seed},
            ).stdout
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    assert answers[0][:2] == answers[1][:2]
    # The second process found all that the first had stored.
    assert answers[0][2] == 9000
    assert answers[1][2] == 0
