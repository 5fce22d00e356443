"""Looking up: the walk down the tree, and paths that are held to their MACs.

In: tokens, or the name of a node. Out: matches and paths. A row that is not what was
written here goes with all that hangs on it, and the lookup is done again.
"""

import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from kvport.manifest.identity import KeyId
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache import tree
from kvport.snapshot.cache.blob_stream import UnfitFileError
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index, TamperedError
from kvport.snapshot.cache.records import (
    BlobRef,
    Match,
    Namespace,
    NodeRecord,
    RemovalReason,
    Selection,
)
from kvport.snapshot.errors import DiskFullError, GoneError, StorageError

_log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


class Lookup:
    """Looks up in one cache; see `Cache.match`, `longest` and `path`."""

    def __init__(self, index: Index, files: Files, evictor: Evictor) -> None:
        self._index: Final = index
        self._files: Final = files
        self._evictor: Final = evictor

    def match(self, ns: Namespace, tokens: bytes, selection: Selection) -> Match | None:
        """The path that restores the most; see `Cache.match`."""
        row = self._index.namespace_row(ns.id)
        prompt = self._prompt(ns, row, tokens, selection)

        def look() -> Match | None:
            found = tree.best(self._index, prompt)
            if found is None:
                return None
            path = self._index.path(found.n)
            self._index.touch(found.n)
            return Match(path, found.position)

        while True:
            with contextlib.suppress(TamperedError):
                return self._trusted(row, look)

    def longest(self, ns: Namespace, tokens: bytes) -> int:
        """Tokens of the prefix that are stored; see `Cache.longest`."""
        anything = Selection(limit=len(tokens) // TOKEN_SIZE, local=KeyId(""))
        row = self._index.namespace_row(ns.id)
        with self._index.lock:
            prompt = self._prompt(ns, row, tokens, anything)
            return tree.longest(self._index, prompt)

    def path(self, ns: Namespace, tip: NodeId) -> tuple[NodeRecord, ...]:
        """The nodes from the root to `tip`; see `Cache.path`."""
        row = self._index.namespace_row(ns.id)

        def look() -> tuple[NodeRecord, ...]:
            n = self._index.find(row, tip)
            if n is None:
                raise GoneError("the path was removed")
            return self._index.path(n)

        try:
            return self._trusted(row, look)
        except TamperedError as error:
            raise GoneError("the path was not what was stored, and is gone") from error

    def is_ours(self, ns: int, n: int) -> bool:
        """Whether a node's row was written here; one that was not is removed.

        A row that has gone in the meantime is not held to anything.

        Raises:
            StorageError: it could not be removed.
        """

        def look() -> None:
            if self._index.rows([n]) and not self._index.is_sealed(n):
                raise TamperedError(n)

        try:
            self._trusted(ns, look)
        except TamperedError:
            return False
        return True

    def _prompt(
        self, ns: Namespace, row: int, tokens: bytes, selection: Selection
    ) -> tree.Prompt:
        def trailer(ref: BlobRef) -> bytes:
            # Damage there costs no more than the tokens of one segment.
            try:
                return self._files.trailer(ns.id, ref)
            except (OSError, UnfitFileError):
                return b""

        return tree.Prompt(ns, row, tokens, selection, trailer)

    def _trusted(self, ns: int, look: Callable[[], _Result]) -> _Result:
        """What `look` finds; a row that is not ours is removed.

        Raises:
            TamperedError: there was one.
            StorageError: it could not be removed.
        """
        with contextlib.suppress(TamperedError), self._index.lock:
            return look()
        # Again, where nothing changes any more: others may have removed it.
        with self._evictor.changes:
            try:
                with self._index.lock:
                    return look()
            except TamperedError as error:
                _log.warning("cache_row_not_ours", rows=self._index.rows([error.n]))
                self._remove(ns, error.n)
                raise

    def _remove(self, ns: int, n: int) -> None:
        try:
            self._evictor.remove(ns, [n], RemovalReason.TAMPERED)
        except DiskFullError as error:
            raise StorageError("a removal could not be stored") from error
