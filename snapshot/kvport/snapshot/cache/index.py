"""The index: rows about nodes, files and attestations, behind one lock.

In: records. Out: records, row numbers and what a removal left to be unlinked. Changes
are made in the database's `transaction()`.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import Key
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.file_index import FileRow
from kvport.snapshot.cache.mac import NamespaceRow, RowMac
from kvport.snapshot.cache.record_index import RecordIndex, TamperedError
from kvport.snapshot.cache.records import Namespace, NodeRecord
from kvport.snapshot.cache.schema import class_number, class_of, kind_bits
from kvport.snapshot.errors import GoneError

__all__ = [
    "ROOT_ROW",
    "FileRow",
    "GoneNode",
    "Index",
    "LostBlob",
    "TamperedError",
    "first_token",
]

ROOT_ROW: Final = 0
"""`parent` of nodes that start at token 0."""

_NODE: Final = """
SELECT n, "end" FROM node INDEXED BY node_id WHERE ns = ?1
    AND substr(id, 1, 8) = substr(?2, 1, 8) AND id = ?2"""
_DOWN: Final = """
WITH RECURSIVE down(n) AS (
    SELECT value FROM json_each(:roots) UNION
    SELECT node.n FROM down JOIN node ON node.ns = :ns AND node.parent = down.n)
SELECT n FROM node WHERE n IN down ORDER BY "end", n"""

_DELETE_NODES: Final = (
    "DELETE FROM blob WHERE node IN (SELECT value FROM json_each(?))",
    "DELETE FROM attest WHERE node IN (SELECT value FROM json_each(?))",
    "DELETE FROM pin WHERE node IN (SELECT value FROM json_each(?))",
    "DELETE FROM node WHERE n IN (SELECT value FROM json_each(?))",
)


@attrs.frozen
class GoneNode:
    """A node whose row was removed."""

    namespace: str
    key: Key
    end: int


@attrs.frozen
class LostBlob:
    """A blob that a node lost, and stays without.

    Attributes:
        namespace: id.
        blob_class: what it was.
        size: its length in bytes.
        alloc: allocated bytes that go with it; 0 if other nodes own its file, too.
    """

    namespace: str
    blob_class: BlobClass
    size: int
    alloc: int


class Index(RecordIndex):
    """Rows of one root; every method may be called from any thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        account: Account,
        mac: RowMac,
        wall: Callable[[], float],
    ) -> None:
        super().__init__(connection, path, account, mac, wall)
        self._namespaces: dict[str, int] = {}

    # Namespaces and nodes.

    def add_namespace(
        self,
        namespace: Namespace,
        model: str = "",
        source: str = "",
        loaded: int = 0,
    ) -> None:
        """Insert the row, unless it is there, and what is known about its model.

        Args:
            namespace: what it is.
            model: name of the model; empty if none is loaded, and then nothing changes.
            source: directory of the model.
            loaded: when it was loaded, in seconds of the epoch.
        """
        identity = canonical_dumps(namespace.identity.to_json()).decode()
        with self.transaction():
            self.all(
                "INSERT OR IGNORE INTO ns (id, identity, scope, block_size)"
                " VALUES (?, ?, ?, ?)",
                (namespace.id, identity, namespace.scope, namespace.block_size),
            )
            if model:
                self.all(
                    "UPDATE ns SET model = ?, source = ?, loaded = ? WHERE id = ?",
                    (model, source, loaded, namespace.id),
                )
            self.seal_namespace(namespace.id)

    def seal_namespace(self, namespace_id: str) -> None:
        """Give a row the MAC of what it says now; in a transaction."""
        rows = self.all(
            "SELECT id, identity, scope, block_size, model, source, loaded FROM ns"
            " WHERE id = ?",
            (namespace_id,),
        )
        for row in rows:
            mac = self._mac.namespace(NamespaceRow(*row))
            self.all("UPDATE ns SET mac = ? WHERE id = ?", (mac, namespace_id))

    def namespaces(self) -> list[tuple[int, str, str, str, int, str, str, int]]:
        """All rows: number, id, identity, scope, block size, model, source, loaded."""
        return self.all(
            "SELECT n, id, identity, scope, block_size, model, source, loaded FROM ns"
            " ORDER BY id"
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
        rows = self.all(_NODE, (ns, node))
        return rows[0][0] if rows else None

    def is_whole(self, ns: int, node: NodeRecord) -> bool:
        """Whether a node is stored, with all blobs of this record."""
        if (n := self.find(ns, node.id)) is None:
            return False
        ((count,),) = self.all("SELECT count(*) FROM blob WHERE node = ?", (n,))
        return bool(count == len(node.blobs))

    def end_of(self, ns: int, node: NodeId) -> int:
        """Position after a node's last row; 0 for the root.

        Raises:
            GoneError: there is no such node.
        """
        if node == ROOT_NODE:
            return 0
        rows = self.all(_NODE, (ns, node))
        if not rows:
            raise GoneError("the segment was removed")
        return int(rows[0][1])

    def own_ttl(self, ns: int, node: NodeId) -> int | None:
        """See `Cache.ttl`.

        Raises:
            GoneError: there is no such node.
        """
        rows = self.all("SELECT ttl FROM node WHERE n = ?", (self.find(ns, node),))
        if not rows:
            raise GoneError("the segment was removed")
        return None if rows[0][0] is None else int(rows[0][0])

    def rows(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Positions [start, end) of nodes."""
        return self.all(
            'SELECT start, "end" FROM node WHERE n IN (SELECT value FROM json_each(?))',
            (json.dumps(list(nodes)),),
        )

    def add_node(
        self,
        ns: int,
        node: NodeRecord,
        ttl: int | None = None,
        at: int | None = None,
    ) -> bool:
        """Insert a node, or merge kinds and attestations into the one there is.

        Blobs that it was stored with, and has lost since, are its own again, and the
        longer life is. Its parent and its files must have rows, a new one its tokens. A
        row that is not ours is written over. Its life begins with its last use: `at`
        seconds from the epoch, or now. True if it is new.

        Raises:
            GoneError: the parent was removed.
        """
        parent = self.find(ns, node.parent)
        if parent is None:
            raise GoneError("the segment before was removed")
        n = self.find(ns, node.id)
        new = n is None
        lost: list[int] = []
        if n is None:
            n = self.insert(
                "INSERT INTO node (ns, id, parent, start, end, key, first_token, kinds,"
                " children, used, at, ttl, expires)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, ?, ?)",
                (ns, node.id, parent, node.start, node.end, node.key,
                 first_token(node.tokens), ttl, self.expiry(ns, ttl, at)),
            )  # fmt: skip
            self.all("UPDATE node SET children = children + 1 WHERE n = ?", (parent,))
        elif not self.is_sealed(n):
            lost = self._overwrite(n, parent, node)
            self.all(
                "UPDATE node SET ttl = ?, expires = ? WHERE n = ?",
                (ttl, self.expiry(ns, ttl, at), n),
            )
        else:
            self._prolong(ns, n, ttl)
        self.use(n, at)
        self.all(
            "UPDATE node SET kinds = kinds | ? WHERE n = ?", (kind_bits(node.kinds), n)
        )
        for blob in node.blobs:
            self.all(
                "INSERT OR IGNORE INTO blob VALUES (?, ?, ?)",
                (n, class_number(blob.blob_class), self.file_row(ns, blob.digest)),
            )
        for claim in node.attestations:
            self.all(
                "INSERT OR IGNORE INTO attest VALUES (?, ?)", (n, self.claim_row(claim))
            )
        self.doom(lost)
        self.seal(n)
        return new

    def _prolong(self, ns: int, n: int, ttl: int | None) -> None:
        """Give a node this ttl, if it is longer than its own."""
        ((own,),) = self.all("SELECT ttl FROM node WHERE n = ?", (n,))
        old, new = self.ttl_of(ns, own), self.ttl_of(ns, ttl)
        if old is not None and (new is None or new > old):
            self.all("UPDATE node SET ttl = ? WHERE n = ?", (ttl, n))

    def _overwrite(self, n: int, parent: int, node: NodeRecord) -> list[int]:
        """Take all that a planted row says from it; answers the files that it had."""
        files = self.all("SELECT file FROM blob WHERE node = ?", (n,))
        self.all("DELETE FROM blob WHERE node = ?", (n,))
        self.all("DELETE FROM attest WHERE node = ?", (n,))
        self.all(
            'UPDATE node SET parent = ?, start = ?, "end" = ?, key = ?, kinds = 0'
            " WHERE n = ?",
            (parent, node.start, node.end, node.key, n),
        )
        return [file for (file,) in files]

    # Removal.

    def subtree(self, ns: int, roots: Sequence[int]) -> list[int]:
        """These nodes and all below, in an order that has parents before children."""
        rows = self.all(_DOWN, {"roots": json.dumps(list(roots)), "ns": ns})
        return [n for (n,) in rows]

    def remove(self, nodes: Sequence[int]) -> list[GoneNode]:
        """Remove rows of nodes that have no children outside; doom their files.

        Children come before their parents. To be called in a transaction. A parent that
        becomes a leaf takes over the recency and the expiry, so that a path goes from
        its end, oldest path first.
        """
        gone: list[GoneNode] = []
        these = (json.dumps(list(nodes)),)
        # One by one: a parent that goes too hands on what it has just taken over.
        for n in nodes:
            for namespace, ns, key, end, parent, used, at, expires in self.all(
                'SELECT ns.id, ns, key, "end", parent, used, at, expires FROM node'
                " JOIN ns ON ns.n = node.ns WHERE node.n = ?",
                (n,),
            ):
                gone.append(GoneNode(namespace, Key(key), end))
                self.all(
                    "UPDATE node SET children = children - 1, used = max(used, ?),"
                    " at = max(at, ?), expires = iif(expires AND ?, max(expires, ?), 0)"
                    " WHERE n = ? AND ns = ?",
                    (used, at, expires, expires, parent, ns),
                )
        files = self.all(
            "SELECT DISTINCT file FROM blob"
            " WHERE node IN (SELECT value FROM json_each(?))",
            these,
        )
        for statement in _DELETE_NODES:
            self.all(statement, these)
        self.doom([n for (n,) in files])
        for n in nodes:
            self.forget_touch(n)
        return gone

    def drop(
        self, n: int, classes: Iterable[BlobClass], kinds: Iterable[PointKind]
    ) -> list[LostBlob]:
        """Take blobs from a node that stays, leave it these kinds; doom the files.

        To be called in a transaction. Answers what it lost.
        """
        numbers = json.dumps([class_number(name) for name in classes])
        sealed = self.is_sealed(n)
        lost = self.all(
            "SELECT ns.id, blob.class, size, file.n, CASE WHEN EXISTS (SELECT 1"
            " FROM blob other WHERE other.file = file.n AND other.node != blob.node)"
            " THEN 0 ELSE alloc END FROM blob"
            " JOIN file ON file.n = blob.file JOIN ns ON ns.n = file.ns"
            " WHERE node = ? AND blob.class IN (SELECT value FROM json_each(?))",
            (n, numbers),
        )
        for _, number, *_ in lost:
            self.all("DELETE FROM blob WHERE node = ? AND class = ?", (n, number))
        self.all("UPDATE node SET kinds = ? WHERE n = ?", (kind_bits(kinds), n))
        self.doom([file for *_, file, _ in lost])
        if sealed:
            self.seal(n)
        return [
            LostBlob(ns, class_of(number), size, alloc)
            for ns, number, size, _, alloc in lost
        ]


def first_token(tokens: bytes) -> int:
    """The first id of an encoded run."""
    return int.from_bytes(tokens[:4], "little")
