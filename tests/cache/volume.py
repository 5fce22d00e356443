"""A volume of 3 MiB: a real one where mounting is allowed, else a simulated one."""

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvport.manifest.limits import MIB
from tests.cache.builder import walk

SIZE = 3 * MIB
_SMALLEST_COMMIT = 40_960


@contextlib.contextmanager
def mounted(path: Path, size: int = SIZE) -> Iterator[bool]:
    """Whether a tmpfs could be mounted there, for as long as the block runs."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if (
        not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def simulate(path: Path, patch: pytest.MonkeyPatch, size: int = SIZE) -> None:
    """Refuse what would not fit: writes of files, and commits of SQLite."""

    def free() -> int:
        return max(0, size - walk(path))

    def refusing(real, size_of):
        def write(fd, data):
            if stat.S_ISREG(os.fstat(fd).st_mode) and size_of(data) > free():
                raise OSError(errno.ENOSPC, "simulated")
            return real(fd, data)

        return write

    class Connection(sqlite3.Connection):
        def execute(self, sql, *parameters):
            if sql == "COMMIT" and free() < _SMALLEST_COMMIT:
                error = sqlite3.OperationalError("simulated")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return super().execute(sql, *parameters)

    connect = sqlite3.connect
    patch.setattr(os, "write", refusing(os.write, len))
    patch.setattr(os, "writev", refusing(os.writev, lambda parts: sum(map(len, parts))))
    real = os.statvfs

    def statvfs(where):
        if not Path(where).is_relative_to(path):
            return real(where)
        return SimpleNamespace(f_bavail=free(), f_frsize=1, f_blocks=size)

    patch.setattr(os, "statvfs", statvfs)
    patch.setattr(
        sqlite3,
        "connect",
        lambda *args, **options: connect(*args, **{"factory": Connection, **options}),
    )


def free_bytes(path: Path) -> int:
    """What the volume has left."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def fill(path: Path, leave: int = 0) -> Path:
    """Take what is left but for `leave`, as a neighbour does; answers its file."""
    neighbour = path / "neighbour"
    with neighbour.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while (left := free_bytes(path) - leave) > 0:
            file.write(bytes(min(left, 65_536)))
            os.fsync(file.fileno())
    return neighbour


@contextlib.contextmanager
def read_only(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory in which nothing can be written, for as long as the block runs.

    Mounted over itself where that is allowed, else closed to us; root, whom nothing is
    closed to, is told so.
    """
    bind = [["mount", "--bind", str(path), str(path)]]
    bind += [["mount", "-o", "remount,bind,ro", str(path)]]
    if shutil.which("mount") and not any(
        subprocess.run(command, capture_output=True, check=False).returncode
        for command in bind
    ):
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
    elif os.geteuid():
        path.chmod(0o500)
        try:
            yield
        finally:
            path.chmod(0o700)
    else:
        with patch.context() as told:
            found = SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=0, f_frsize=1)
            told.setattr(os, "statvfs", lambda _: found)
            yield
