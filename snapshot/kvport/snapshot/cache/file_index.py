"""Rows about files: what is stored under a digest, who owns it, what is to go.

In: digests, node rows. Out: sizes, row numbers, files to be unlinked. Digests are
indexed by their first bytes: that each has one row is seen to here, under the lock.
"""

import json
from collections.abc import Sequence
from typing import Final

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.snapshot.cache.database import Database
from kvport.snapshot.cache.records import BlobRef
from kvport.snapshot.cache.schema import class_number

_FILE: Final = """
SELECT n, size, trailer, alloc, live FROM file INDEXED BY file_digest WHERE file.ns = ?1
    AND substr(digest, 1, 8) = substr(?2, 1, 8) AND digest = ?2"""


@attrs.frozen
class FileRow:
    """A file that has lost its last node, or does with the next removal."""

    n: int
    namespace: str
    digest: BlobDigest
    alloc: int


class FileIndex(Database):
    """Files of one root; every method may be called from any thread."""

    def file_row(self, ns: int, digest: BlobDigest) -> int | None:
        """Row number of a file, live or not; None if there is none."""
        rows = self.all(_FILE, (ns, digest))
        return rows[0][0] if rows else None

    def file_size(self, ns: int, digest: BlobDigest) -> int | None:
        """Size of a live file's blob, None if there is none."""
        found = self.file_sizes(ns, digest)
        return None if found is None else found[0]

    def file_sizes(self, ns: int, digest: BlobDigest) -> tuple[int, int] | None:
        """Bytes of a live file's blob and of its trailer, None if there is none."""
        for _, size, trailer, _, live in self.all(_FILE, (ns, digest)):
            if live:
                return size, trailer
        return None

    def has_file(self, ns: int, name: str) -> bool:
        """Whether a file of this name has a row, live or doomed."""
        try:
            digest = bytes.fromhex(name)
        except ValueError:
            return False
        return digest.hex() == name and bool(self.all(_FILE, (ns, digest)))

    def add_file(self, ns: int, ref: BlobRef, alloc: int) -> int:
        """Insert a file's row; returns the bytes of one that it replaces."""
        old = self.all(_FILE, (ns, ref.digest))
        number = class_number(ref.blob_class)
        if not old:
            self.all(
                "INSERT INTO file (ns, digest, class, size, trailer, alloc, live)"
                " VALUES (?, ?, ?, ?, ?, ?, 1)",
                (ns, ref.digest, number, ref.size, ref.trailer, alloc),
            )
            return 0
        ((n, _, _, replaced, _),) = old
        self.all(
            "UPDATE file SET class = ?, size = ?, trailer = ?, alloc = ?, live = 1"
            " WHERE n = ?",
            (number, ref.size, ref.trailer, alloc, n),
        )
        return int(replaced)

    def set_allocated(self, found: Sequence[tuple[int, int]]) -> None:
        """Store allocated bytes that were measured again: pairs of bytes and row."""
        with self.transaction():
            for values in found:
                self.all("UPDATE file SET alloc = ? WHERE n = ?", values)

    def owners(self, ns: int, digest: BlobDigest) -> list[int]:
        """Row numbers of the nodes that have this blob."""
        n = self.file_row(ns, digest)
        rows = self.all("SELECT node FROM blob WHERE file = ?", (n,))
        return [node for (node,) in rows]

    def doomed(self) -> list[FileRow]:
        """Files that lost their last node, not yet unlinked."""
        rows = self.all(
            "SELECT file.n, ns.id, digest, alloc FROM file JOIN ns ON ns.n = file.ns"
            " WHERE live = 0"
        )
        return [FileRow(n, ns, BlobDigest(digest), a) for n, ns, digest, a in rows]

    def own_files(self, n: int) -> list[FileRow]:
        """Files that would lose their last node with this one."""
        rows = self.all(
            "SELECT file.n, ns.id, digest, alloc FROM blob"
            " JOIN file ON file.n = blob.file JOIN ns ON ns.n = file.ns"
            " WHERE blob.node = ? AND"
            " NOT EXISTS (SELECT 1 FROM blob other"
            " WHERE other.file = file.n AND other.node != blob.node)",
            (n,),
        )
        return [FileRow(n, ns, BlobDigest(digest), a) for n, ns, digest, a in rows]

    def forget_files(self, files: Sequence[FileRow]) -> None:
        """Remove the rows of files that are unlinked."""
        numbers = json.dumps([file.n for file in files])
        with self.transaction():
            self.all(
                "DELETE FROM file WHERE n IN (SELECT value FROM json_each(?))"
                " AND NOT live",
                (numbers,),
            )

    def doom(self, files: Sequence[int]) -> None:
        """Mark those of these files that no node has any more; in a transaction."""
        self.all(
            "UPDATE file SET live = 0 WHERE n IN (SELECT value FROM json_each(?))"
            " AND NOT EXISTS (SELECT 1 FROM blob WHERE blob.file = file.n)",
            (json.dumps(files),),
        )
