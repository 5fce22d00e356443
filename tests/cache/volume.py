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
def mounted(path: Path) -> Iterator[bool]:
    """Whether a tmpfs could be mounted there, for as long as the block runs."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
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


def simulate(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Refuse what would not fit: writes of files, and commits of SQLite."""

    def free() -> int:
        return max(0, SIZE - walk(path))

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
    patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free(), f_frsize=1))
    patch.setattr(
        sqlite3,
        "connect",
        lambda *args, **options: connect(*args, **{"factory": Connection, **options}),
    )


def fill(path: Path) -> Path:
    """Take all that is left, as a neighbour does; answers its file."""
    neighbour = path / "neighbour"
    with neighbour.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while (left := os.statvfs(path)).f_bavail:
            file.write(bytes(min(left.f_bavail * left.f_frsize, 65_536)))
            os.fsync(file.fileno())
    return neighbour
