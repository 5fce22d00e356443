"""The caches that a home has had: where they are, and under which limits they ran.

In: starts of servers. Out: the cache that is meant where none is named, the id that it
must have, and the limits that a start as the last one would give it.
"""

from pathlib import Path
from typing import Final, Self

import attrs

from kvport.snapshot.cache.root import is_root
from kvport.snapshot.errors import MissingRootError, SettingError
from kvport.snapshot.remembered import Remembered

_AUTO: Final = "auto"


@attrs.frozen
class Limits:
    """Of a cache on its volume, in bytes; None is `auto`.

    Attributes:
        cap: hard limit of the cache.
        floor: free bytes that its volume keeps.
    """

    cap: int | None = None
    floor: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """As `str` writes them; what is not of that form is `auto`."""
        cap, _, floor = text.partition(" ")
        return cls(_parse(cap), _parse(floor))

    def __str__(self) -> str:
        sizes = (self.cap, self.floor)
        return " ".join(_AUTO if size is None else str(size) for size in sizes)


class KnownRoots:
    """Of one home; used by whoever owns it, and read by anyone."""

    def __init__(self, home: Path) -> None:
        self._home: Final = home
        self._ids: Final = Remembered(home / "cache-roots.json")
        self._limits: Final = Remembered(home / "cache-limits.json")

    def to_serve(self, named: Path | None) -> Path:
        """Where a server's cache is: as named, as it was, or else below the home.

        Raises:
            SettingError: the home had several, and none is named.
        """
        if named is not None:
            return named.absolute()
        return self._only() or (self._home / "cache").absolute()

    def to_open(self, named: Path | None) -> Path:
        """Where the cache is that a command is about.

        Raises:
            MissingRootError: there is none.
            SettingError: the home had several, and none is named.
        """
        if named is not None:
            root = named.absolute()
            if self.id_of(root) is None and not is_root(root):
                raise MissingRootError("no cache is there")
            return root
        if (only := self._only()) is None:
            raise MissingRootError("the home has not had a cache yet")
        return only

    def _only(self) -> Path | None:
        known = self._ids.names()
        if len(known) > 1:
            raise SettingError(
                f"the home has had several caches: {', '.join(known)}; name one with"
                " --cache-dir"
            )
        return Path(known[0]) if known else None

    @property
    def served(self) -> Path | None:
        """Where the cache of the last server is, or of the one that runs."""
        names = self._limits.names() or self._ids.names()
        return Path(names[-1]) if names else None

    def all(self) -> tuple[Path, ...]:
        """Every one that this home had."""
        return tuple(map(Path, self._ids.names()))

    def id_of(self, root: Path) -> str | None:
        """The id that a root must have; None if it is not known."""
        return self._ids.get(str(root))

    def limits(self, root: Path) -> Limits:
        """Those of the last server on a root."""
        return Limits.parse(self._limits.get(str(root)) or "")

    def opened(self, root: Path, root_id: str) -> None:
        """Remember a root, durably.

        Raises:
            OSError: it could not be written.
        """
        self._ids.put(str(root), root_id)

    def serves(self, root: Path, limits: Limits) -> None:
        """Remember that a server runs on a root, and under which limits.

        Raises:
            OSError: it could not be written.
        """
        self._limits.put_last(str(root), str(limits))


def _parse(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() else None
