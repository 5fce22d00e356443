"""Namespaces as the index knows them, and whether their state can still be used.

In: rows of the index, the engine's version, the file system's word about directories.
Out: namespaces with the model that made them, and why some are *incompatible*: counted,
shown, and the first to make room; never deleted for that alone.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import StateIdentity
from kvport.snapshot.cache.index import Index


@attrs.frozen
class KnownNamespace:
    """One row.

    Attributes:
        n: its number.
        id: name of its directory.
        identity: of its state; None if this version cannot read it.
        scope: who may see it.
        block_size: tokens in a block.
        model: name of the model when it was loaded last; empty if that is unknown.
        source: directory of the model then; empty likewise.
        loaded: when that was, in seconds of the epoch; 0 likewise.
    """

    n: int
    id: str
    identity: StateIdentity | None
    scope: str
    block_size: int
    model: str
    source: str
    loaded: int


Judge: TypeAlias = Callable[[Sequence[KnownNamespace]], Mapping[str, str]]
"""Says of the namespaces that cannot be used why, by id."""
NamesOf: TypeAlias = Callable[[str, str], Sequence[str]]
"""Names of a namespace, of its id and its model's name when that was loaded last."""


def name_at_load(_: str, model: str) -> Sequence[str]:
    """The name of the last load is all that is known."""
    return (model,) if model else ()


class Namespaces:
    """The rows, read once and after each change."""

    def __init__(self, index: Index, names: NamesOf) -> None:
        self._index: Final = index
        self._names: Final = names
        self._lock: Final = threading.Lock()
        self._all: tuple[KnownNamespace, ...] | None = None

    def all(self) -> tuple[KnownNamespace, ...]:
        """All of them, by id."""
        with self._lock:
            if (found := self._all) is None:
                found = self._all = tuple(
                    KnownNamespace(
                        n, name, _identity(text), scope, size, model, source, loaded
                    )
                    for n, name, text, scope, size, model, source, loaded in (
                        self._index.namespaces()
                    )
                )
            return found

    def named(self) -> tuple[KnownNamespace, ...]:
        """The same, with all names that each of them goes by now as its model's."""
        return tuple(
            attrs.evolve(one, model=", ".join(self._names(one.id, one.model)))
            for one in self.all()
        )

    def changed(self) -> None:
        """Read them again next time."""
        with self._lock:
            self._all = None


def unusable(
    known: Sequence[KnownNamespace],
    *,
    mlx_lm: str,
    is_directory: Callable[[str], bool],
) -> dict[str, str]:
    """Why namespaces cannot be used by a node with this engine, by id.

    Args:
        known: all namespaces.
        mlx_lm: version of the engine.
        is_directory: whether a model's directory is there.
    """
    newest: dict[str, KnownNamespace] = {}
    for one in sorted(known, key=lambda one: one.loaded):
        if one.source and one.identity is not None:
            newest[one.source] = one
    found = {}
    for one in known:
        reason = _reason(one, newest.get(one.source), mlx_lm)
        if reason is None and one.source and not is_directory(one.source):
            reason = "its model's directory is gone"
        if reason is not None:
            found[one.id] = reason
    return found


def _reason(
    one: KnownNamespace, newest: KnownNamespace | None, mlx_lm: str
) -> str | None:
    if one.identity is None:
        return "its identity is of another version"
    if one.identity.mlx_lm != mlx_lm:
        return f"made by mlx-lm {one.identity.mlx_lm}"
    if newest is None or newest.identity is None or newest.loaded <= one.loaded:
        return None
    if newest.identity.model_files != one.identity.model_files:
        return "its model's files have changed"
    return None


def _identity(text: str) -> StateIdentity | None:
    with contextlib.suppress(KvportError, ValueError, RecursionError):
        return StateIdentity.from_json(json.loads(text))
    return None
