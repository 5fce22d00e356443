"""Purging: what came from a key that is revoked goes, whoever holds it.

In: key ids. Out: what went. A node goes if each statement about it names such a key,
and then all below it does: what was computed on top came from there, too. A node that
something else is true of stays, without the statements that name the key.

What is gone is gone from lookups at once, since rows go first; a crash in between
leaves some for the next start, and no node without statements.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import attrs

from kvport.manifest.identity import KeyId
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.records import RemovalReason

_NAMING: Final = """
SELECT n FROM claim WHERE EXISTS
    (SELECT 1 FROM json_each(?) WHERE instr(claim.origins, value))"""
_HOPELESS: Final = """
SELECT ns, n FROM node WHERE n IN (
    SELECT node FROM attest GROUP BY node
    HAVING min(claim IN (SELECT value FROM json_each(?))))
ORDER BY n"""
_NAMED: Final = """
SELECT DISTINCT node FROM attest WHERE claim IN (SELECT value FROM json_each(?))
LIMIT ?"""
_STRIP: Final = """
DELETE FROM attest WHERE node = ?
    AND claim IN (SELECT value FROM json_each(?))"""


@attrs.frozen
class Purged:
    """What purging did.

    Attributes:
        freed_bytes: allocated bytes of files that went.
        removed_segments: nodes that went.
        kept_segments: nodes that stay, since something else is true of them.
    """

    freed_bytes: int = 0
    removed_segments: int = 0
    kept_segments: int = 0


def purge(
    index: Index, account: Account, evictor: Evictor, keys: Collection[KeyId]
) -> Purged:
    """Remove what came from these keys, in spite of leases and pins.

    Leases on what went hold nothing from then on, and say so to who uses them.

    Raises:
        DiskFullError: the index cannot grow for it; some of it may be done.
        StorageError: the index could not be written, likewise.
    """
    with evictor.changes:
        claims = [n for (n,) in index.all(_NAMING, (json.dumps(sorted(keys)),))]
        if not claims:
            return Purged()
        naming = json.dumps(claims)
        before = account.numbers.blobs
        hopeless: defaultdict[int, list[int]] = defaultdict(list)
        for ns, n in index.all(_HOPELESS, (naming,)):
            hopeless[ns].append(n)
        removed = sum(
            evictor.remove(ns, roots, RemovalReason.REVOKED)
            for ns, roots in hopeless.items()
        )
        kept = 0
        while nodes := index.all(_NAMED, (naming, index.rows_per_removal)):
            these = [n for (n,) in nodes]
            evictor.relieved(functools.partial(_strip, index, these, naming))
            kept += len(these)
        evictor.leases.drop_gone()
        evictor.renew_ballast()
        return Purged(before - account.numbers.blobs, removed, kept)


def _strip(index: Index, nodes: Sequence[int], naming: str) -> None:
    """Take statements from nodes that have others."""
    with index.transaction():
        for n in nodes:
            sealed = index.is_sealed(n)
            index.all(_STRIP, (n, naming))
            # What was planted does not become ours.
            if sealed:
                index.seal(n)
