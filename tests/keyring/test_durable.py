import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from kvport.snapshot import durable
from kvport.snapshot.durable import (
    fsync_directory,
    fsync_file,
    write_atomic,
    write_once,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("write", [write_atomic, write_once])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_content_and_mode_are_exact(tmp_path, write, mode):
    before = os.umask(0o777)
    try:
        write(tmp_path / "a", b"data", mode)
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"data"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
    assert names(tmp_path) == ["a"]


def test_an_atomic_write_replaces_the_file_and_not_its_content(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, b"old", 0o600)
    with path.open("rb") as reader:
        write_atomic(path, b"new", 0o600)
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_an_atomic_write_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "far").write_bytes(b"far")
    (tmp_path / "a").symlink_to("far")
    write_atomic(tmp_path / "a", b"new", 0o600)
    assert (tmp_path / "far").read_bytes() == b"far"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("there", ["file", "link"])
def test_what_is_written_once_is_never_replaced(tmp_path, there):
    path = tmp_path / "a"
    if there == "file":
        path.write_bytes(b"old")
    else:
        path.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        write_once(path, b"new", 0o600)
    assert names(tmp_path) == ["a"]
    assert there == "link" or path.read_bytes() == b"old"


@pytest.mark.parametrize("write", [write_atomic, write_once])
def test_a_write_that_fails_leaves_nothing(tmp_path, write):
    (tmp_path / "a").mkdir()
    with pytest.raises((IsADirectoryError, FileExistsError)):
        write(tmp_path / "a", b"new", 0o600)
    assert names(tmp_path) == ["a"]


def test_flushes_reach_the_kernel(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        fsync_file(file.fileno())
    fsync_directory(tmp_path)
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "a")
    with pytest.raises(OSError, match="descriptor"):
        fsync_file(file_descriptor_of_nothing())


def test_a_full_flush_is_used_where_the_system_has_it(tmp_path, monkeypatch):
    not_offered, harmless = 51, fcntl.F_GETFD  # 51 is macOS's F_FULLFSYNC
    with (tmp_path / "a").open("wb") as file:
        for command in (not_offered, harmless):
            monkeypatch.setattr(durable, "_FULL_FSYNC", command)
            fsync_file(file.fileno())
    with pytest.raises(OSError, match="descriptor"):
        fsync_file(file_descriptor_of_nothing())


def file_descriptor_of_nothing():
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on file size stands in for the disk: the write fails half way."""
    path = tmp_path / "a"
    write_atomic(path, b"old", 0o600)
    program = f"""
import pathlib, resource, signal
from kvport.snapshot import durable
from kvport.snapshot.durable import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_atomic(pathlib.Path({str(path)!r}), bytes(8192), 0o600)
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(errno.EFBIG)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]
