"""The index: rows about nodes, files and attestations, behind one lock.

In: records. Out: records, row numbers and what a removal left to be unlinked. Changes
are made in the database's `transaction()`.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, Key
from kvport.manifest.identity import (
    KeyId,
    Lineage,
    Numerics,
    PointKind,
    Provenance,
)
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.database import Database
from kvport.snapshot.cache.records import BlobRef, Namespace, NodeRecord
from kvport.snapshot.cache.schema import kind_bits, kinds_of
from kvport.snapshot.errors import GoneError

ROOT_ROW: Final = 0
"""`parent` of nodes that start at token 0."""

_UP: Final = """
WITH RECURSIVE up(n, depth) AS (
    SELECT :tip, 0 UNION ALL
    SELECT node.parent, up.depth + 1 FROM up JOIN node ON node.n = up.n
    WHERE node.parent != 0)
SELECT node.n, id, start, "end", key, tokens, kinds FROM up
JOIN node ON node.n = up.n ORDER BY up.depth DESC"""
_DOWN: Final = """
WITH RECURSIVE down(n) AS (
    SELECT value FROM json_each(:roots) UNION
    SELECT node.n FROM down JOIN node ON node.ns = :ns AND node.parent = down.n)
SELECT n FROM node WHERE n IN down ORDER BY "end", n"""

_DELETE_NODES: Final = (
    "DELETE FROM blob WHERE node IN (SELECT value FROM json_each(?))",
    "DELETE FROM attest WHERE node IN (SELECT value FROM json_each(?))",
    "DELETE FROM node WHERE n IN (SELECT value FROM json_each(?))",
)


@attrs.frozen
class FileRow:
    """A file that has lost its last node, or does with the next removal."""

    n: int
    namespace: str
    digest: BlobDigest
    alloc: int


@attrs.frozen
class GoneNode:
    """A node whose row was removed."""

    namespace: str
    key: Key
    end: int


class Index(Database):
    """Rows of one root; every method may be called from any thread."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, account: Account
    ) -> None:
        super().__init__(connection, path, account)
        self._numerics: dict[int, Numerics] = {}
        self._namespaces: dict[str, int] = {}

    # Namespaces and nodes.

    def add_namespace(self, namespace: Namespace) -> None:
        """Insert the row, unless it is there."""
        identity = canonical_dumps(namespace.identity.to_json()).decode()
        with self.transaction():
            self.all(
                "INSERT OR IGNORE INTO ns (id, identity, scope, block_size)"
                " VALUES (?, ?, ?, ?)",
                (namespace.id, identity, namespace.scope, namespace.block_size),
            )

    def namespace_row(self, namespace_id: str) -> int:
        """Row number of a namespace.

        Raises:
            GoneError: there is none.
        """
        with self.lock:
            if (found := self._namespaces.get(namespace_id)) is None:
                rows = self.all("SELECT n FROM ns WHERE id = ?", (namespace_id,))
                if not rows:
                    raise GoneError("the namespace was never made here")
                found = self._namespaces[namespace_id] = rows[0][0]
            return found

    def find(self, ns: int, node: NodeId) -> int | None:
        """Row number of a node; `ROOT_ROW` for the root, None if there is none."""
        if node == ROOT_NODE:
            return ROOT_ROW
        rows = self.all("SELECT n FROM node WHERE ns = ? AND id = ?", (ns, node))
        return rows[0][0] if rows else None

    def is_whole(self, ns: int, node: NodeRecord) -> bool:
        """Whether a node is stored, with all blobs of this record."""
        ((count,),) = self.all(
            "SELECT count(*) FROM blob"
            " WHERE node = (SELECT n FROM node WHERE ns = ? AND id = ?)",
            (ns, node.id),
        )
        return bool(count == len(node.blobs) and self.find(ns, node.id) is not None)

    def end_of(self, ns: int, node: NodeId) -> int:
        """Position after a node's last row; 0 for the root.

        Raises:
            GoneError: there is no such node.
        """
        if node == ROOT_NODE:
            return 0
        rows = self.all('SELECT "end" FROM node WHERE ns = ? AND id = ?', (ns, node))
        if not rows:
            raise GoneError("the segment was removed")
        return int(rows[0][0])

    def path(self, tip: int) -> tuple[NodeRecord, ...]:
        """Records from the root to this row; empty for `ROOT_ROW`."""
        with self.lock:
            rows = self.all(_UP, {"tip": tip})
            these = (json.dumps([row[0] for row in rows]),)
            blobs: dict[int, dict[BlobClass, BlobRef]] = {}
            for n, blob_class, digest, size in self.all(
                "SELECT node, class, digest, size FROM blob"
                " JOIN file ON file.n = blob.file"
                " WHERE node IN (SELECT value FROM json_each(?))",
                these,
            ):
                ref = BlobRef(BlobClass(blob_class), BlobDigest(digest), size)
                blobs.setdefault(n, {})[ref.blob_class] = ref
            claims: dict[int, list[Provenance]] = {}
            for n, lineage, numerics, origins in self.all(
                "SELECT node, lineage, numerics, origins FROM attest"
                " WHERE node IN (SELECT value FROM json_each(?))",
                these,
            ):
                made_by = frozenset(map(KeyId, origins.split()))
                claims.setdefault(n, []).append(
                    Provenance(Lineage(lineage), self._numerics_of(numerics), made_by)
                )
            records: list[NodeRecord] = []
            for n, node, start, end, key, tokens, kinds in rows:
                held = blobs.get(n, {})
                records.append(
                    NodeRecord(
                        id=NodeId(node),
                        parent=records[-1].id if records else ROOT_NODE,
                        start=start,
                        end=end,
                        key=Key(key),
                        tokens=tokens,
                        blobs=tuple(held[c] for c in BlobClass if c in held),
                        kinds=kinds_of(kinds),
                        attestations=tuple(claims.get(n, ())),
                    )
                )
            return tuple(records)

    def add_node(self, ns: int, node: NodeRecord) -> bool:
        """Insert a node, or merge kinds and attestations into the one there is.

        Blobs that it was stored with, and has lost since, are its own again. Its parent
        and its files must have rows. True if it is new.

        Raises:
            GoneError: the parent was removed.
        """
        parent = self.find(ns, node.parent)
        if parent is None:
            raise GoneError("the segment before was removed")
        kinds = kind_bits(node.kinds)
        n = self.find(ns, node.id)
        new = n is None
        if n is None:
            n = self.insert(
                "INSERT INTO node (ns, id, parent, start, end, key, first_token, kinds,"
                " children, used, tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)",
                (ns, node.id, parent, node.start, node.end, node.key,
                 first_token(node.tokens), kinds, self.next_used(), node.tokens),
            )  # fmt: skip
            self.all("UPDATE node SET children = children + 1 WHERE n = ?", (parent,))
        else:
            self.all(
                "UPDATE node SET kinds = kinds | ?, used = ? WHERE n = ?",
                (kinds, self.next_used(), n),
            )
        for blob in node.blobs:
            self.all(
                "INSERT OR IGNORE INTO blob SELECT ?, ?, n FROM file"
                " WHERE ns = ? AND digest = ?",
                (n, blob.blob_class.value, ns, blob.digest),
            )
        for claim in node.attestations:
            self.all(
                "INSERT OR IGNORE INTO attest VALUES (?, ?, ?, ?)",
                (n, claim.lineage.value, self._add_numerics(claim.numerics),
                 origins_text(claim.origins)),
            )  # fmt: skip
        return new

    # Files.

    def file_size(self, ns: int, digest: BlobDigest) -> int | None:
        """Size of a live file, None if there is none."""
        rows = self.all(
            "SELECT size FROM file WHERE ns = ? AND digest = ? AND live",
            (ns, digest),
        )
        return rows[0][0] if rows else None

    def add_file(self, ns: int, digest: BlobDigest, size: int, alloc: int) -> int:
        """Insert a file's row; returns the bytes of one that it replaces."""
        where = (ns, digest)
        old = self.all("SELECT alloc FROM file WHERE ns = ? AND digest = ?", where)
        self.all(
            "INSERT INTO file (ns, digest, size, alloc, live) VALUES (?, ?, ?, ?, 1)"
            " ON CONFLICT DO UPDATE SET size = excluded.size, alloc = excluded.alloc,"
            " live = 1",
            (ns, digest, size, alloc),
        )
        return old[0][0] if old else 0

    def set_allocated(self, found: Sequence[tuple[int, int]]) -> None:
        """Store allocated bytes that were measured again: pairs of bytes and row."""
        with self.transaction():
            for values in found:
                self.all("UPDATE file SET alloc = ? WHERE n = ?", values)

    def owners(self, ns: int, digest: BlobDigest) -> list[int]:
        """Row numbers of the nodes that have this blob."""
        rows = self.all(
            "SELECT blob.node FROM file JOIN blob ON blob.file = file.n"
            " WHERE file.ns = ? AND digest = ?",
            (ns, digest),
        )
        return [n for (n,) in rows]

    def rows(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Positions [start, end) of nodes."""
        return self.all(
            'SELECT start, "end" FROM node WHERE n IN (SELECT value FROM json_each(?))',
            (json.dumps(list(nodes)),),
        )

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

    # Removal.

    def subtree(self, ns: int, roots: Sequence[int]) -> list[int]:
        """These nodes and all below, in an order that has parents before children."""
        rows = self.all(_DOWN, {"roots": json.dumps(list(roots)), "ns": ns})
        return [n for (n,) in rows]

    def remove(self, nodes: Sequence[int]) -> list[GoneNode]:
        """Remove rows of nodes that have no children outside; doom their files.

        To be called in a transaction. A parent that becomes a leaf takes over the
        recency, so that a path goes from its end, oldest path first.
        """
        gone: list[GoneNode] = []
        these = (json.dumps(list(nodes)),)
        for namespace, key, end, parent, used in self.all(
            'SELECT ns.id, key, "end", parent, used FROM node'
            " JOIN ns ON ns.n = node.ns"
            " WHERE node.n IN (SELECT value FROM json_each(?))",
            these,
        ):
            gone.append(GoneNode(namespace, Key(key), end))
            self.all(
                "UPDATE node SET children = children - 1, used = max(used, ?)"
                " WHERE n = ?",
                (used, parent),
            )
        files = self.all(
            "SELECT DISTINCT file FROM blob"
            " WHERE node IN (SELECT value FROM json_each(?))",
            these,
        )
        for statement in _DELETE_NODES:
            self.all(statement, these)
        self._doom([n for (n,) in files])
        for n in nodes:
            self.forget_touch(n)
        return gone

    def drop(
        self, n: int, classes: Iterable[BlobClass], kinds: Iterable[PointKind]
    ) -> list[tuple[BlobClass, int]]:
        """Take blobs from a node that stays, leave it these kinds; doom the files.

        To be called in a transaction. Answers class and size of what it lost.
        """
        lost = self.all(
            "SELECT class, size, file.n FROM blob JOIN file ON file.n = blob.file"
            " WHERE node = ? AND class IN (SELECT value FROM json_each(?))",
            (n, json.dumps(list(classes))),
        )
        for blob_class, _, _ in lost:
            self.all("DELETE FROM blob WHERE node = ? AND class = ?", (n, blob_class))
        self.all("UPDATE node SET kinds = ? WHERE n = ?", (kind_bits(kinds), n))
        self._doom([file for _, _, file in lost])
        return [(BlobClass(blob_class), size) for blob_class, size, _ in lost]

    # Internals.

    def _doom(self, files: Sequence[int]) -> None:
        self.all(
            "UPDATE file SET live = 0 WHERE n IN (SELECT value FROM json_each(?))"
            " AND NOT EXISTS (SELECT 1 FROM blob WHERE blob.file = file.n)",
            (json.dumps(files),),
        )

    def numerics_row(self, numerics: Numerics) -> int | None:
        """Row number of these numerics, None if nothing was ever attested with them."""
        text = canonical_dumps(numerics.to_json()).decode()
        rows = self.all("SELECT n FROM numerics WHERE json = ?", (text,))
        return rows[0][0] if rows else None

    def _add_numerics(self, numerics: Numerics) -> int:
        if (found := self.numerics_row(numerics)) is not None:
            return found
        text = canonical_dumps(numerics.to_json()).decode()
        return self.insert("INSERT INTO numerics (json) VALUES (?)", (text,))

    def _numerics_of(self, n: int) -> Numerics:
        if (found := self._numerics.get(n)) is None:
            ((text,),) = self.all("SELECT json FROM numerics WHERE n = ?", (n,))
            found = self._numerics[n] = Numerics.from_json(json.loads(text))
        return found


def first_token(tokens: bytes) -> int:
    """The first id of an encoded run."""
    return int.from_bytes(tokens[:4], "little")


def origins_text(origins: Iterable[KeyId]) -> str:
    """The one text form of a set of origins."""
    return " ".join(sorted(origins))
