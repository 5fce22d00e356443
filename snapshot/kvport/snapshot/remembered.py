"""Facts that a home remembers: a small map of texts in one JSON file.

What is lost is found out again, so a file that is missing, damaged or of another shape
is an empty map.
"""

import json
from pathlib import Path

import structlog

from kvport.snapshot.durable import write_atomic

log = structlog.get_logger(__name__)


class Remembered:
    """One file's facts; used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._facts: dict[str, str] = {}
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()):
            self._facts = found
        else:
            log.warning("remembered_facts_lost", file=path.name)

    def get(self, key: str) -> str | None:
        """The fact of this name, if it is known."""
        return self._facts.get(key)

    def names(self) -> tuple[str, ...]:
        """The names of all facts, the first one learned first."""
        return tuple(self._facts)

    def put(self, key: str, fact: str) -> None:
        """Remember a fact, durably.

        Raises:
            OSError: the file could not be written; the fact is known until the end.
        """
        if self._facts.get(key) != fact:
            self._write({**self._facts, key: fact})

    def put_last(self, key: str, fact: str) -> None:
        """Remember a fact as the one that was learned last: see `put`.

        Raises:
            OSError: as of `put`.
        """
        if [*self._facts.items()][-1:] != [(key, fact)]:
            others = {one: known for one, known in self._facts.items() if one != key}
            self._write({**others, key: fact})

    def _write(self, facts: dict[str, str]) -> None:
        self._facts = facts
        write_atomic(self._path, json.dumps(facts).encode(), 0o600)
