"""What the rows say there is on the disk, and how that differs from what there is.

In: the index, and directories. Out: differences. Nothing is changed here. A million
rows take some 90 MB, in arrays; each file is looked at once, and none is opened.
"""

import itertools
import os
import re
import stat
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvport.snapshot.cache.directories import is_directory, tree_allocated
from kvport.snapshot.cache.index import Index

_Numbers: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]
"""Of shape (digests, 4)."""

_SOME: Final = 8192
"""Rows or files at a time: what they take as objects does not grow with the cache."""
_BLOB: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SECTOR: Final = 512
# A planted digest may have another length.
_ROWS: Final = """
SELECT n, ns, size + trailer, alloc, live != 0,
    CASE length(digest) WHEN 32 THEN digest ELSE zeroblob(32) END
FROM file WHERE n > ? ORDER BY n LIMIT ?"""


@attrs.define
class Difference:
    """Of one namespace's rows and its directory; files are row numbers.

    Attributes:
        orphans: names that no row speaks of.
        missing: files that are not there.
        damaged: files of another size than their rows say, or that are none.
        resized: allocated bytes, as found, of files whose row says something else;
            of damaged ones too, since not every one may go.
        growth: bytes that these have more than their rows say.
    """

    orphans: list[str] = attrs.field(factory=list)
    missing: list[int] = attrs.field(factory=list)
    damaged: list[int] = attrs.field(factory=list)
    resized: list[tuple[int, int]] = attrs.field(factory=list)
    growth: int = 0


class Inventory:
    """All rows of files; doomed ones too, but no difference is told of these."""

    def __init__(self, index: Index) -> None:
        columns = tuple(array("q") for _ in range(5))
        digests = bytearray()
        for some in _rows(index):
            digests += b"".join(row[-1] for row in some)
            for column, values in zip(columns, zip(*some, strict=True), strict=False):
                column.extend(values)
        self._n, ns, self._size, self._alloc, live = map(_numbers, columns)
        self._live = live != 0
        self._seen = np.zeros(len(ns), np.bool_)
        self._digests = _words(digests)
        first = self._digests[:, 0]
        # By namespace, then by the first word of the digest, as both of these are:
        self._order = np.lexsort((first, ns))
        self._ns = ns[self._order]
        self._first = first[self._order]

    @property
    def allocated(self) -> int:
        """Bytes of all files, as their rows say."""
        return int(self._alloc.sum())

    def compare(self, ns: int, directory: Path) -> Difference:
        """Look at each file of a namespace, once.

        Raises:
            OSError: the directory, or what is in it, could not be looked at.
        """
        found = Difference()
        start, end = np.searchsorted(self._ns, (ns, ns + 1))
        some = slice(int(start), int(end))
        for entries in _entries(directory):
            self._compare(some, directory, entries, found)
        rows = self._order[some]
        found.missing = self._n[rows[self._live[rows] & ~self._seen[rows]]].tolist()
        return found

    def _compare(
        self,
        some: slice,
        directory: Path,
        entries: list[os.DirEntry[str]],
        found: Difference,
    ) -> None:
        named = [entry for entry in entries if _BLOB.fullmatch(entry.name)]
        digests = _words(bytes.fromhex("".join([entry.name for entry in named])))
        rows = self._find(some, digests)
        known = rows >= 0
        if not known.all() or len(named) < len(entries):
            ours = {entry.name for entry in itertools.compress(named, known)}
            found.orphans += [e.name for e in entries if e.name not in ours]
        self._seen[rows[known]] = True
        alive = known.copy()
        alive[known] = self._live[rows[known]]
        rows = rows[alive]
        sizes, allocs = _measured(directory, itertools.compress(named, alive))
        growth = allocs - self._alloc[rows]
        found.growth += int(growth.sum())
        resized = growth != 0
        found.resized += zip(
            allocs[resized].tolist(), self._n[rows[resized]].tolist(), strict=True
        )
        found.damaged += self._n[rows[sizes != self._size[rows]]].tolist()

    def _find(self, some: slice, digests: _Words) -> _Numbers:
        """Places of these digests' rows, -1 where there is none."""
        found = np.full(len(digests), -1)
        order, first = self._order[some], self._first[some]
        places = np.searchsorted(first, digests[:, 0])
        left = np.arange(len(digests))
        # Again for those that share the first word with another.
        while len(left := left[places[left] < len(first)]):
            left = left[first[places[left]] == digests[left, 0]]
            rows = order[places[left]]
            same = (self._digests[rows] == digests[left]).all(axis=1)
            found[left[same]] = rows[same]
            left = left[~same]
            places[left] += 1
        return found


def _rows(index: Index) -> Iterator[list[tuple[int, int, int, int, int, bytes]]]:
    last = -(1 << 63)
    while some := index.all(_ROWS, (last, _SOME)):
        yield some
        last = some[-1][0]


def _entries(directory: Path) -> Iterator[list[os.DirEntry[str]]]:
    if not is_directory(directory):
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    # By its number: no path is followed again for each file.
    fd = os.open(directory, flags)
    try:
        with os.scandir(fd) as entries:
            while some := list(itertools.islice(entries, _SOME)):
                yield some
    finally:
        os.close(fd)


def _measured(
    directory: Path, entries: Iterable[os.DirEntry[str]]
) -> tuple[_Numbers, _Numbers]:
    """Sizes, -1 of what is no file, and allocated bytes."""
    sizes, allocs = array("q"), array("q")
    for entry in entries:
        found = entry.stat(follow_symlinks=False)
        sizes.append(found.st_size if stat.S_ISREG(found.st_mode) else -1)
        is_tree = stat.S_ISDIR(found.st_mode)
        allocs.append(
            tree_allocated(directory / entry.name)
            if is_tree
            else found.st_blocks * _SECTOR
        )
    return _numbers(sizes), _numbers(allocs)


def _numbers(values: "array[int]") -> _Numbers:
    return np.frombuffer(values, np.int64)


def _words(digests: bytes | bytearray) -> _Words:
    return np.frombuffer(digests, np.uint64).reshape(-1, 4)
