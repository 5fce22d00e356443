"""Uploads: directories on the cache's volume where imports stage their blobs.

In: an import's id, bytes that will be staged. Out: a directory, and room under the cap.
"""

import re
from pathlib import Path
from typing import Final

from kvport.snapshot.cache.account import BLOCK, Reservation
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.errors import StorageError

_IMPORT_ID: Final = re.compile(r"[a-z0-9-]{1,64}", re.ASCII)


class Uploads:
    """See `Cache.reserve`, `staging` and `discard_staging`."""

    def __init__(self, files: Files, evictor: Evictor) -> None:
        self._files: Final = files
        self._evictor: Final = evictor
        self.open: Final[set[str]] = set()
        """Names of directories that are in use."""

    def reserve(self, nbytes: int, files: int) -> Reservation:
        """Hold room for so many files."""
        whole = -(-nbytes // BLOCK) * BLOCK
        return self._evictor.reserve(whole + files * 3 * BLOCK)

    def make(self, import_id: str) -> Path:
        """The import's directory."""
        path = self._path(import_id)
        self.open.add(import_id)
        with self._evictor.reserve(2 * BLOCK), self._evictor.measuring():
            self._files.make_directory(path)
        return path

    def discard(self, import_id: str) -> None:
        """Remove it with all that is in it.

        Raises:
            StorageError: the volume refused; what is left stays on the account.
        """
        self._files.check_root()
        gone = self._files.remove(self._path(import_id))
        self.open.discard(import_id)
        self._evictor.measure()
        if not gone:
            raise StorageError("an upload's files could not be removed")

    def _path(self, import_id: str) -> Path:
        if not _IMPORT_ID.fullmatch(import_id):
            raise ValueError("an import's id must be a plain name")
        return self._files.staging / import_id
