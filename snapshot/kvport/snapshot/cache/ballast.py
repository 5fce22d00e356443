"""The ballast: room on the volume that can be given up when everything else is taken.

In: the root, and a size. Out: a file of that size, allocated for real, or its room. On
a full volume even a removal fails, since the index's log must grow for it. What the
ballast gives back is enough for the first one, and that one frees more.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

from kvport.snapshot.cache.directories import remove_tree
from kvport.snapshot.cache.regular import create, is_own, open_own

_log = structlog.get_logger(__name__)


class Ballast:
    """One file below the root; whoever calls keeps the account."""

    def __init__(self, root: Path) -> None:
        self._root: Final = root
        self._path: Final = root / "ballast"

    def stands(self, size: int) -> bool:
        """Whether the file is there, whole and allocated."""
        try:
            found = self._path.lstat()
        except OSError:
            return False
        return (
            self._is_own() and found.st_size == size and found.st_blocks * 512 >= size
        )

    def beyond(self, size: int) -> int:
        """Bytes that the file has above a size."""
        try:
            found = self._path.lstat()
        except OSError:
            return 0
        return max(0, found.st_size - size) if self._is_own() else 0

    def shrink(self, size: int) -> None:
        """Give back what the file has above a size; what is not ours goes whole.

        Raises:
            OSError: the volume refused.
        """
        if self.beyond(size):
            with open_own(self._root, self._path) as file:
                file.truncate(size)
        elif not self._is_own():
            self.drop()

    def drop(self) -> bool:
        """Give the room back; False if there was none to give."""
        if not os.path.lexists(self._path):
            return False
        try:
            remove_tree(self._path)
        except OSError as error:
            _log.warning("cache_ballast_kept", errno=error.errno)
            return False
        return True

    def make(self, size: int) -> None:
        """Write the file, where there is none.

        Raises:
            OSError: nothing is left of it.
        """
        fd = create(self._root, self._path)
        try:
            # Random: file systems that compress, or keep holes, would store no zeros.
            rest = memoryview(os.urandom(size))
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """What the volume has left for us, 0 if it does not say."""
        try:
            found = os.statvfs(self._root)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def _is_own(self) -> bool:
        try:
            return is_own(self._root, self._path)
        except OSError:
            return False
