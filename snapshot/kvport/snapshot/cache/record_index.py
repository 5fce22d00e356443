"""Rows about nodes as records, each held to its MAC.

In: row numbers. Out: paths of records, claims; or `TamperedError`, where a row is not
what was written with the home's key. What changes a row seals it again, and only if it
was sound: a planted row does not become ours by being touched.
"""

import json
import sqlite3
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, Key
from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, Lineage, Numerics, Provenance
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.file_index import FileIndex
from kvport.snapshot.cache.mac import BlobRow, RowMac
from kvport.snapshot.cache.records import BlobRef, NodeRecord
from kvport.snapshot.cache.schema import class_of, kinds_of

# Starts descend, so that a circle of planted parents ends.
_UP: Final = """
WITH RECURSIVE up(n, parent, start) AS (
    SELECT n, parent, start FROM node WHERE n = :tip UNION ALL
    SELECT node.n, node.parent, node.start FROM up
    JOIN node ON node.n = up.parent AND node.start < up.start)
SELECT node.n, ns.id, node.id, node.start, "end", key, kinds, node.mac,
    node.parent FROM up
JOIN node ON node.n = up.n JOIN ns ON ns.n = node.ns ORDER BY node.start"""
_ONE: Final = """
SELECT node.n, ns.id, node.id, node.start, node."end", node.key, node.kinds, node.mac,
    above.id
FROM node JOIN ns ON ns.n = node.ns LEFT JOIN node above ON above.n = node.parent
WHERE node.n = ?"""
_BLOBS: Final = """
SELECT node, blob.class, digest, size, trailer FROM blob JOIN file ON file.n = blob.file
WHERE node IN (SELECT value FROM json_each(?)) ORDER BY node, blob.class"""
_CLAIMS: Final = """
SELECT DISTINCT claim.n, lineage, numerics.json, origins FROM attest
JOIN claim ON claim.n = attest.claim JOIN numerics ON numerics.n = claim.numerics
WHERE node IN (SELECT value FROM json_each(?))"""
_ATTESTED: Final = """
SELECT node, claim FROM attest WHERE node IN (SELECT value FROM json_each(?))"""

UNFIT: Final = (TypeError, ValueError, AttributeError, struct.error, KvportError)
"""What planted values may lead to."""


class TamperedError(Exception):
    """A row is not what was written here.

    Attributes:
        n: the node's row number.
    """

    def __init__(self, n: int) -> None:
        """Of the row with this number."""
        super().__init__("a row of the index does not have its MAC")
        self.n: Final = n


@attrs.frozen
class _Claim:
    mac: bytes
    said: Provenance


@attrs.frozen
class _Held:
    """What belongs to some nodes, by row number."""

    blobs: dict[int, list[BlobRow]]
    claims: dict[int, list[_Claim]]


class RecordIndex(FileIndex):
    """Nodes as records; every method may be called from any thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        account: Account,
        mac: RowMac,
        wall: Callable[[], float],
    ) -> None:
        super().__init__(connection, path, account, wall)
        self._mac: Final = mac

    def path(self, tip: int) -> tuple[NodeRecord, ...]:
        """Records from the root to this row, without tokens; empty for `ROOT_ROW`.

        Raises:
            TamperedError: a row of the path is not ours.
        """
        with self.lock:
            rows = self.all(_UP, {"tip": tip})
            numbers = [row[0] for row in rows]
            held = self._held(numbers)
        last, above, start, records = 0, ROOT_NODE, 0, []
        for *row, parent in rows:
            n = row[0]
            # A path has no gaps: a row may be sound where its parent is not there.
            if (parent, row[3]) != (last, start) or not self._fits(row, above, held):
                raise TamperedError(n)
            records.append(_record(row, above, held))
            last, above, start = n, records[-1].id, records[-1].end
        if last != tip:
            raise TamperedError(tip)
        return tuple(records)

    def said(self, claim: int) -> Provenance | None:
        """What a claim says; None if that cannot be read."""
        rows = self.all(
            "SELECT lineage, json, origins FROM claim"
            " JOIN numerics ON numerics.n = claim.numerics WHERE claim.n = ?",
            (claim,),
        )
        try:
            return _provenance(*rows[0])
        except (IndexError, *UNFIT):
            return None

    def claim_row(self, claim: Provenance) -> int:
        """Row number of a claim, which is made if it is new; in a transaction."""
        text = canonical_dumps(claim.numerics.to_json()).decode()
        self.all("INSERT OR IGNORE INTO numerics (json) VALUES (?)", (text,))
        ((numerics,),) = self.all("SELECT n FROM numerics WHERE json = ?", (text,))
        values = (claim.lineage.value, numerics, origins_text(claim.origins))
        self.all(
            "INSERT OR IGNORE INTO claim (lineage, numerics, origins) VALUES (?, ?, ?)",
            values,
        )
        ((n,),) = self.all(
            "SELECT n FROM claim WHERE lineage = ? AND numerics = ? AND origins = ?",
            values,
        )
        return int(n)

    def is_sealed(self, n: int) -> bool:
        """Whether a row, which must be there, has the MAC of what it says."""
        ((*row, above),) = self.all(_ONE, (n,))
        return self._fits(row, above or ROOT_NODE, self._held([n]))

    def seal(self, n: int) -> None:
        """Give a row the MAC of what it says now; in a transaction."""
        ((*row, above),) = self.all(_ONE, (n,))
        mac = self._mac_of(row, above or ROOT_NODE, self._held([n]))
        self.all("UPDATE node SET mac = ? WHERE n = ?", (mac, n))

    def _fits(self, row: Sequence[Any], above: bytes, held: _Held) -> bool:
        try:
            return bool(self._mac_of(row, above, held) == row[7])
        except UNFIT:
            return False

    def _mac_of(self, row: Sequence[Any], above: bytes, held: _Held) -> bytes:
        n, namespace, node, start, end, key, kinds, _ = row
        return self._mac.node(
            (namespace.encode(), node, above, key),
            (start, end, kinds),
            held.blobs.get(n, ()),
            [claim.mac for claim in held.claims.get(n, ())],
        )

    def _held(self, numbers: Sequence[int]) -> _Held:
        these = (json.dumps(numbers),)
        blobs: dict[int, list[BlobRow]] = {}
        for n, *row in self.all(_BLOBS, these):
            blobs.setdefault(n, []).append(tuple(row))
        known = {}
        for n, *texts in self.all(_CLAIMS, these):
            # One that cannot be read is missing, and so in every MAC.
            try:
                known[n] = _Claim(self._mac.claim(*texts), _provenance(*texts))
            except UNFIT:
                continue
        claims: dict[int, list[_Claim]] = {}
        for n, claim in self.all(_ATTESTED, these):
            if claim in known:
                claims.setdefault(n, []).append(known[claim])
        return _Held(blobs, claims)


def origins_text(origins: frozenset[KeyId]) -> str:
    """The one text form of a set of origins."""
    return " ".join(sorted(origins))


def _record(row: Sequence[Any], above: NodeId, held: _Held) -> NodeRecord:
    n, _, node, start, end, key, kinds, _ = row
    return NodeRecord(
        id=NodeId(node),
        parent=above,
        start=start,
        end=end,
        key=Key(key),
        blobs=tuple(
            BlobRef(class_of(number), BlobDigest(digest), size, trailer)
            for number, digest, size, trailer in held.blobs.get(n, ())
        ),
        kinds=kinds_of(kinds),
        attestations=tuple(claim.said for claim in held.claims.get(n, ())),
    )


def _provenance(lineage: str, numerics: str, origins: str) -> Provenance:
    return Provenance(
        Lineage(lineage),
        Numerics.from_json(json.loads(numerics)),
        frozenset(map(KeyId, origins.split())),
    )
