"""Foreign: what stands below the root and is not the cache's.

In: the root, names of namespaces and uploads. Out: paths, and what they take. The
directory is for nothing else: a start removes them, and so does `gc`. Until then they
are on the account, and so within the cap.
"""

import contextlib
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Final

import structlog

from kvport.snapshot.cache.directories import (
    allocated,
    is_directory,
    names_in,
    tree_allocated,
)

_OURS: Final = frozenset({
    "ballast",
    "index.sqlite",
    "index.sqlite-suspect",
    "index.sqlite-wal",
    "ns",
    "root.json",
    "staging",
})  # fmt: skip
_SYSTEMS: Final = frozenset({
    ".DocumentRevisions-V100",
    ".PKInstallSandboxManager-SystemSoftware",
    ".Spotlight-V100",
    ".TemporaryItems",
    ".Trashes",
    ".fseventsd",
    "lost+found",
})  # fmt: skip
"""What systems keep at the top of a volume, things that users deleted among it."""
_TRASH: Final = ".Trash-"
_NAMED: Final = 10

_log = structlog.get_logger(__name__)


def foreign_in(
    root: Path, namespaces: Container[str], uploads: Container[str]
) -> list[Path]:
    """Files and directories that are not the cache's, in the root or right below.

    Args:
        root: of the cache.
        namespaces: names of directories in `ns` that are.
        uploads: names of directories in `staging` that are.

    Raises:
        OSError: the volume does not say.
    """
    known = ((root, _OURS), (root / "ns", namespaces), (root / "staging", uploads))
    return [
        directory / name
        for directory, names in known
        for name in names_in(root, directory)
        if name not in names
    ]


def is_removable(root: Path, path: Path) -> bool:
    """Whether something foreign goes; at the top of a volume, not what is the system's.

    Such a volume's trash is no orphan of ours.
    """
    if path.parent != root or not os.path.ismount(root):
        return True
    return path.name not in _SYSTEMS and not path.name.startswith(_TRASH)


def content_bytes(root: Path, paths: Iterable[Path]) -> int:
    """Allocated bytes of these without what counts as overhead anyway.

    That is what is in the root, and directories in those below.
    """
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            counted = path.parent == root or is_directory(path)
            total += tree_allocated(path) - allocated(path) * counted
    return total


def total_bytes(paths: Iterable[Path]) -> int:
    """Allocated bytes of all of these."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += tree_allocated(path)
    return total


def announce(paths: Iterable[Path]) -> None:
    """Say what will go, by name: it may have been put there by mistake."""
    paths = list(paths)
    if paths:
        _log.warning(
            "cache_foreign_files",
            files=len(paths),
            nbytes=total_bytes(paths),
            # Whoever named them may have put anything into it.
            names=[
                path.name.encode("unicode_escape").decode() for path in paths[:_NAMED]
            ],
        )
