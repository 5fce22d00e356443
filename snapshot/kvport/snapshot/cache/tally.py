"""How much is stored, by namespace and class, without a look at every row.

In: an open index. Out: totals that are always true: the connection's own triggers keep
them in tables in memory, in the very transactions that change the rows, so that what is
undone there is undone here. Opening counts all rows once.
"""

from collections.abc import Mapping
from typing import Final

import attrs

from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.schema import class_of

_KEPT: Final = (
    "CREATE TEMP TABLE node_tally (ns INTEGER PRIMARY KEY, nodes, tokens)",
    """CREATE TEMP TABLE file_tally
        (ns, class, files, alloc, PRIMARY KEY (ns, class)) WITHOUT ROWID""",
    """INSERT INTO temp.node_tally
        SELECT ns, count(*), sum("end" - start) FROM node GROUP BY ns""",
    # By row: in the order of an index of digests each row is a page somewhere else.
    """INSERT INTO temp.file_tally
        SELECT ns, class, count(*), sum(alloc) FROM file NOT INDEXED
        GROUP BY ns, class""",
    """CREATE TEMP TRIGGER node_added AFTER INSERT ON main.node BEGIN
        INSERT INTO node_tally VALUES (new.ns, 1, new."end" - new.start)
        ON CONFLICT DO UPDATE SET nodes = nodes + 1, tokens = tokens + excluded.tokens;
    END""",
    """CREATE TEMP TRIGGER node_gone AFTER DELETE ON main.node BEGIN
        UPDATE node_tally SET nodes = nodes - 1, tokens = tokens - old."end" + old.start
        WHERE ns = old.ns;
    END""",
    """CREATE TEMP TRIGGER file_added AFTER INSERT ON main.file BEGIN
        INSERT INTO file_tally VALUES (new.ns, new.class, 1, new.alloc)
        ON CONFLICT DO UPDATE SET files = files + 1, alloc = alloc + excluded.alloc;
    END""",
    """CREATE TEMP TRIGGER file_changed AFTER UPDATE OF class, alloc ON main.file BEGIN
        UPDATE file_tally SET files = files - 1, alloc = alloc - old.alloc
        WHERE ns = old.ns AND class = old.class;
        INSERT INTO file_tally VALUES (new.ns, new.class, 1, new.alloc)
        ON CONFLICT DO UPDATE SET files = files + 1, alloc = alloc + excluded.alloc;
    END""",
    """CREATE TEMP TRIGGER file_gone AFTER DELETE ON main.file BEGIN
        UPDATE file_tally SET files = files - 1, alloc = alloc - old.alloc
        WHERE ns = old.ns AND class = old.class;
    END""",
)


@attrs.frozen
class Held:
    """Files of one class, those that wait to be unlinked too, and what they take."""

    files: int
    nbytes: int


@attrs.frozen
class Stored:
    """What one namespace holds: nodes, the tokens in them, and files by class."""

    nodes: int = 0
    tokens: int = 0
    kinds: Mapping[BlobClass, Held] = attrs.field(factory=dict)


class Tally:
    """Of one index, from here on; see the module."""

    def __init__(self, index: Index) -> None:
        self._index = index
        for statement in _KEPT:
            index.all(statement)

    def allocated(self) -> dict[int, int]:
        """Allocated bytes of files, by the namespaces' rows; empty ones may miss."""
        return dict(
            self._index.all("SELECT ns, sum(alloc) FROM temp.file_tally GROUP BY ns")
        )

    def stored(self) -> Mapping[int, Stored]:
        """What is stored now, by the namespaces' rows; empty ones may be missing."""
        with self._index.lock:
            kinds: dict[int, dict[BlobClass, Held]] = {}
            for ns, number, files, alloc in self._index.all(
                "SELECT ns, class, files, alloc FROM temp.file_tally WHERE files > 0"
            ):
                kinds.setdefault(ns, {})[class_of(number)] = Held(files, alloc)
            nodes = {
                ns: (count, tokens)
                for ns, count, tokens in self._index.all(
                    "SELECT ns, nodes, tokens FROM temp.node_tally"
                )
            }
        return {
            ns: Stored(*nodes.get(ns, (0, 0)), kinds.get(ns, {}))
            for ns in kinds.keys() | nodes.keys()
        }
