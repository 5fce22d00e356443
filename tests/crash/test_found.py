"""What the matrices have found, each pinned to the very calls that showed it."""

import errno

import pytest

from tests.crash.recording import Op
from tests.crash.shim import linux_only

pytestmark = linux_only


def first(recorded, op: Op, path: str) -> int:
    """The step that was the first of its kind, below a path."""
    return next(r.step for r in recorded.log if r.op is op and r.path.startswith(path))


def test_a_first_start_that_was_killed_leaves_no_temporary_file(recorded):
    one = recorded("begin")
    made = first(one, Op.CREATE, "cache/.root.json")
    for step in range(made, made + 5):
        assert one.killed(step) == []


def test_a_start_finds_files_where_there_is_no_row_at_all(recorded):
    one = recorded("begin")
    named = first(one, Op.RENAME, "cache/ns/")
    for step in range(named, named + 4):
        assert one.killed(step) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    ("name", "at", "ops"),
    [
        # A blob that cannot be flushed, and whose file then cannot be removed either.
        ("store", (Op.FSYNC, "cache/ns/"), "fsync,unlink"),
        # Directories that are there, though they could not be flushed.
        ("store", (Op.FSYNC, "cache/ns"), "fsync,rmdir"),
        ("import", (Op.FSYNC, "cache/staging"), "fsync,unlink,rmdir"),
        ("import", (Op.WRITE, "cache/staging/"), "write,unlink,rmdir"),
        # Renamed already, and no way back.
        ("import", (Op.FSYNC, "cache/ns/"), "fsync,unlink,rmdir,rename"),
        ("begin", (Op.FSYNC, "cache/ballast"), "fsync,unlink"),
        # Not SQLite's own calls, and so not its errors.
        ("clear", (Op.CREATE, "cache/index.sqlite-wal"), "unlink"),
        ("begin", (Op.CREATE, "cache/index.sqlite"), "fsync"),
    ],
)
def test_what_a_failing_volume_keeps_is_on_the_account(recorded, name, at, ops, error):
    one = recorded(name)
    codes, bad = one.failed(fail=first(one, *at), sticky=1, errno=error, ops=ops)
    assert bad == []
    assert set(codes) <= {"storage", "disk_full", "capacity"}
