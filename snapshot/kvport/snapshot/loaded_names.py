"""Names that namespaces are loaded under: what the sections of a home's file go by.

In: loads and unloads. Out: for each namespace its names, also after a restart, before
any model is loaded: so what is set about it does not depend on the order of the loads.

A name is a namespace's from a load until it is unloaded, or until another namespace is
loaded under it. The last one that is unloaded stays, so that state of a model that is
not loaded goes by a name too.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from kvport.snapshot.durable import write_atomic

log = structlog.get_logger(__name__)


class LoadedNames:
    """One file; thread-safe. What is lost of it is known again after the next load."""

    def __init__(self, path: Path) -> None:
        """Read it; one that is missing or damaged is empty."""
        self._path: Final = path
        self._lock: Final = threading.Lock()
        self._names: Mapping[str, tuple[str, ...]] = _read(path)

    def of(self, namespace_id: str) -> tuple[str, ...]:
        """In alphabetical order; empty if it has not been loaded."""
        return self._names.get(namespace_id, ())

    def add(self, namespace_id: str, name: str) -> None:
        """It was loaded under this name, which is no other one's any more."""
        with self._lock:
            others = {
                one: tuple(other for other in names if other != name)
                for one, names in self._names.items()
            }
            names = {*others.get(namespace_id, ()), name}
            self._put({**others, namespace_id: tuple(sorted(names))})

    def remove(self, namespace_id: str, name: str) -> None:
        """It was unloaded under this name, which stays if it is the only one."""
        with self._lock:
            left = tuple(one for one in self.of(namespace_id) if one != name)
            if left:
                self._put({**self._names, namespace_id: left})

    def _put(self, names: Mapping[str, tuple[str, ...]]) -> None:
        names = {one: some for one, some in names.items() if some}
        if names == self._names:
            return
        self._names = names
        try:
            write_atomic(self._path, json.dumps(names).encode(), 0o600)
        except OSError as error:
            log.warning("loaded_names_not_written", errno=error.errno)


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and all(map(_is_names, found.values())):
        return {one: tuple(sorted(names)) for one, names in found.items()}
    log.warning("loaded_names_lost", file=path.name)
    return {}


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
