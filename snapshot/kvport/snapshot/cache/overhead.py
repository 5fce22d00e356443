"""Overhead: what directories, and the root's own files, take of the volume.

In: paths at which something was made, renamed or removed. Out: allocated bytes. Of the
namespaces' directories only those of such paths are measured again, so that what a
batch costs does not grow with the number of namespaces. Not counted: the index, which
measures itself, and what lies in those directories.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvport.snapshot.cache.directories import allocated, is_directory, names_in
from kvport.snapshot.cache.foreign import content_bytes, total_bytes

_MEASURED_ELSEWHERE: Final = frozenset({"index.sqlite", "index.sqlite-wal"})


class Overhead:
    """Of one root; every method may be called from any thread."""

    def __init__(self, root: Path, namespaces: Path, staging: Path) -> None:
        self._root: Final = root
        self._namespaces: Final = namespaces
        self._staging: Final = staging
        self._sizes: Final[dict[Path, int]] = {}
        self._total = 0
        self._contents = 0
        self.foreign: frozenset[Path] = frozenset()
        """What is not the cache's, as of the last look at it."""
        self.foreign_bytes = 0
        """Allocated bytes of all of it."""
        self._changed: Final[set[Path]] = set()
        self._lock: Final = threading.Lock()

    @contextlib.contextmanager
    def changing(self, *paths: Path) -> Iterator[None]:
        """Make, rename or remove something at these paths, or fail in the midst."""
        try:
            yield
        finally:
            # Not before: a measurement in between would see too little, and be the
            # last one.
            near = {one for path in paths for one in (path, path.parent)}
            with self._lock:
                self._changed.update(
                    one for one in near if one.parent == self._namespaces
                )

    def measure(self, foreign: Iterable[Path] | None = None) -> int:
        """Allocated bytes.

        Args:
            foreign: what is not the cache's: look at all of it, and at every namespace,
                since others may have been at work.

        Raises:
            OSError: a directory could not be looked at; the next call looks again.
        """
        paths = [self._root]
        paths += [
            path
            for path in self._inside(self._root)
            if path.name not in _MEASURED_ELSEWHERE
        ]
        # Uploads are written by others, and few.
        paths += filter(is_directory, self._inside(self._staging))
        fixed = sum(map(_allocated, paths))
        with self._lock:
            if foreign is not None:
                self.foreign = frozenset(foreign)
                self._contents = content_bytes(self._root, self.foreign)
                self.foreign_bytes = total_bytes(self.foreign)
                self._changed.update(self._sizes, self._inside(self._namespaces))
            for path in list(self._changed):
                size = allocated(path) if is_directory(path) else 0
                self._total += size - self._sizes.pop(path, 0)
                if size:
                    self._sizes[path] = size
                self._changed.discard(path)
            return fixed + self._total + self._contents

    def _inside(self, directory: Path) -> list[Path]:
        return [directory / name for name in names_in(self._root, directory)]


def _allocated(path: Path) -> int:
    try:
        return allocated(path)
    except FileNotFoundError:
        return 0  # It went meanwhile.
