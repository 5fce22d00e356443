"""Directories below the root, held by number: no link in a path leads out of the root.

In: paths. Out: descriptors of their directories, what is in them and how much it takes.
Whoever can write to the volume can exchange a directory for a link at any time, also
between a look and a removal: so each step of a path is opened from the one before.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvport.snapshot.durable import fsync_directory

_SECTOR: Final = 512
"""Unit of `st_blocks`, whatever the file system's block."""
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def opened(root: Path, path: Path) -> Iterator[int]:
    """A directory's descriptor.

    Args:
        root: taken as it is, links and all.
        path: below it, or itself.

    Raises:
        FileNotFoundError: it is not there.
        NotADirectoryError: it, or one on the way, is a link or no directory.
        OSError: it cannot be opened now.
        ValueError: the path does not lie below the root.
    """
    steps = path.relative_to(root).parts
    if ".." in steps:
        raise ValueError("a path that leads up")
    fd = os.open(root, _FLAGS)
    try:
        for step in steps:
            above = fd
            # A link is ELOOP on some systems, and ENOTDIR on others.
            try:
                fd = os.open(step, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
            except OSError:
                if _is_other(step, above):
                    raise NotADirectoryError(step) from None
                raise
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def names_in(root: Path, path: Path) -> list[str]:
    """What is in a directory below the root; nothing if it is none, or not there."""
    try:
        with opened(root, path) as fd:
            return _names(fd)
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_below(root: Path, path: Path) -> None:
    """Remove a directory or file below the root with all below it, however deep.

    Never what a link points to, nor what a path leads to through one, nor what is on
    another volume that is mounted there: that is not ours.

    Raises:
        OSError: the volume refused, or another one begins there.
    """
    try:
        with opened(root, path.parent) as fd:
            try:
                found = os.stat(path.name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return
            if stat.S_ISDIR(found.st_mode):
                _remove_directory(path.name, fd)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path.name, dir_fd=fd)
    except (FileNotFoundError, NotADirectoryError):
        return


def sync_directories(directories: Iterable[Path]) -> None:
    """Flush directories in which names were made."""
    for directory in set(directories):
        fsync_directory(directory)


def remove_tree(path: Path) -> None:
    """Remove a directory or file with all below it, never what a link points to."""
    remove_below(path.parent, path)


def is_directory(path: Path) -> bool:
    """Whether a directory is there; a link to one is none."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def allocated(path: Path) -> int:
    """Allocated bytes of one file."""
    return path.lstat().st_blocks * _SECTOR


def tree_allocated(path: Path) -> int:
    """Allocated bytes of a file, or of a directory with all below it on its volume."""
    total = allocated(path)
    if not is_directory(path):
        return total
    device = path.parent.stat().st_dev
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        # What goes meanwhile, or cannot be looked at, is not counted.
        with contextlib.suppress(OSError):
            if directory.lstat().st_dev != device:
                continue
            with os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        total += found.st_blocks * _SECTOR
                        if stat.S_ISDIR(found.st_mode):
                            waiting.append(directory / entry.name)
    return total


def _remove_directory(name: str, above: int) -> None:
    """Empty a directory, and remove it.

    A directory in one in it is moved up first: so a tree may be of any depth.
    """
    device = os.fstat(above).st_dev
    top = _enter(name, above, device)
    try:
        waiting = _names(top)
        while waiting:
            one = waiting.pop()
            if not _is_directory(one, top):
                _unlink(one, top)
                continue
            fd = _enter(one, top, device)
            try:
                for inner in _names(fd):
                    if not _is_directory(inner, fd):
                        _unlink(inner, fd)
                        continue
                    moved = secrets.token_hex(8)
                    os.rename(inner, moved, src_dir_fd=fd, dst_dir_fd=top)
                    waiting.append(moved)
            finally:
                os.close(fd)
            os.rmdir(one, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=above)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries]


def _enter(name: str, above: int, device: int) -> int:
    fd = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
    if os.fstat(fd).st_dev != device:
        os.close(fd)
        raise OSError(errno.EXDEV, "another volume")
    return fd


def _unlink(name: str, above: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=above)


def _is_directory(name: str, above: int) -> bool:
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode)


def _is_other(name: str, fd: int) -> bool:
    try:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return not stat.S_ISDIR(found.st_mode)
