"""A directory as a power cut could leave it: operations replayed, less what was unsafe.

The rules are POSIX's, not those of one file system: `fsync` of a file keeps its bytes
and its size, `fsync` of a directory keeps the names in it, and nothing else is kept. A
rename within a directory is one change; between two, each directory has its half.
What was not kept may be there or not: bytes by pages, names one by one.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath

import attrs

from tests.crash.recording import Op, Record

PAGE = 4096


class Loss(StrEnum):
    """What of the unsafe is lost."""

    ALL = "all"
    NAMES = "names"
    ZEROS = "zeros"
    """Names are there, and sizes; bytes are zeros."""
    EMPTY = "empty"
    """Names are there, files end where they did when they were last flushed."""
    SOME = "some"
    """By chance: names one by one, bytes by pages, in any version since the flush."""
    TAIL = "tail"
    """By chance: names after some point in time, and bytes as in `SOME`."""


@attrs.define(eq=False)
class File:
    """Bytes that are safe, and what was done to them since."""

    safe: bytes = b""
    since: list[tuple[int, bytes | None]] = attrs.field(factory=list)
    """Offsets with what was written there; a size with None, where it was cut."""

    def flush(self) -> None:
        self.safe, self.since = self.content(len(self.since)), []

    def content(self, count: int) -> bytes:
        """After the first `count` changes."""
        data = bytearray(self.safe)
        for at, written in self.since[:count]:
            if written is None:
                del data[at:]
                data.extend(bytes(max(0, at - len(data))))
            else:
                data.extend(bytes(max(0, at - len(data))))
                data[at : at + len(written)] = written
        return bytes(data)

    def after(self, loss: Loss, rng: random.Random) -> bytes:
        """As a power cut could leave them."""
        last = self.content(len(self.since))
        if not self.since or loss is Loss.NAMES:
            return last
        if loss in (Loss.ALL, Loss.EMPTY):
            return self.safe
        if loss is Loss.ZEROS:
            return self.safe[: len(last)].ljust(len(last), b"\0")
        versions = [self.content(count) for count in range(len(self.since) + 1)]
        size = len(rng.choice(versions))
        pages = (
            rng.choice(versions)[at : at + PAGE].ljust(PAGE, b"\0")
            for at in range(0, size, PAGE)
        )
        return b"".join(pages)[:size]


@attrs.define(eq=False)
class Directory:
    """Names that are safe, and changes since: names with what they stand for."""

    safe: dict[str, "File | Directory"] = attrs.field(factory=dict)
    since: list[dict[str, "File | Directory | None"]] = attrs.field(factory=list)

    @property
    def names(self) -> dict[str, "File | Directory"]:
        """As a running process sees them."""
        return self._with(self.since)

    def change(self, names: Mapping[str, "File | Directory | None"]) -> None:
        self.since.append(dict(names))

    def flush(self) -> None:
        self.safe, self.since = self.names, []

    def after(self, loss: Loss, rng: random.Random) -> dict[str, "File | Directory"]:
        """As a power cut could leave them."""
        if loss in (Loss.ALL, Loss.NAMES):
            return self.safe
        if loss is Loss.SOME:
            return self._with([some for some in self.since if rng.random() < 0.5])
        if loss is Loss.TAIL:
            return self._with(self.since[: rng.randint(0, len(self.since))])
        return self.names

    def _with(
        self, changes: Iterable[Mapping[str, "File | Directory | None"]]
    ) -> dict[str, "File | Directory"]:
        names: dict[str, File | Directory | None] = dict(self.safe)
        for change in changes:
            names |= change
        return {name: found for name, found in names.items() if found is not None}


class Disk:
    """The directory as it was prepared, and every operation that is replayed on it."""

    def __init__(self, prepared: Path, inodes: Mapping[str, int]) -> None:
        """Take what is there as safe.

        Args:
            prepared: the directory.
            inodes: of everything in it, in the copy that was recorded.
        """
        self.root = Directory()
        self._by_inode: dict[int, File | Directory] = {}
        self._load(prepared, prepared, self.root, inodes)

    def replay(self, record: Record) -> None:
        """Do what was done."""
        if record.op is Op.FSYNC:
            self._flushed(record).flush()
        elif record.op is Op.WRITE:
            self._file(record).since.append((record.offset, record.data))
        elif record.op is Op.TRUNCATE:
            self._file(record).since.append((record.offset, None))
        elif record.op in _MAKERS:
            made = self._by_inode[record.inode] = _MAKERS[record.op]()
            self._change(record.path, made)
        elif record.op in (Op.UNLINK, Op.RMDIR):
            self._change(record.path, None)
        elif record.op in (Op.RENAME, Op.LINK):
            self._move(record)

    def write(self, directory: Path, loss: Loss, seed: object) -> None:
        """Make the directory as a power cut now could leave it."""
        _write(self.root, directory, loss, random.Random(repr(seed)))

    def _load(
        self, path: Path, top: Path, into: Directory, inodes: Mapping[str, int]
    ) -> None:
        for entry in sorted(path.iterdir()):
            made = Directory() if entry.is_dir() else File(entry.read_bytes())
            into.safe[entry.name] = made
            self._by_inode[inodes[str(entry.relative_to(top))]] = made
            if isinstance(made, Directory):
                self._load(entry, top, made, inodes)

    def _flushed(self, record: Record) -> "File | Directory":
        if record.path == ".":
            return self.root
        return self._by_inode[record.inode]

    def _file(self, record: Record) -> File:
        found = self._by_inode[record.inode]
        assert isinstance(found, File)
        return found

    def _parent(self, path: str) -> tuple[Directory, str]:
        *parents, name = PurePosixPath(path).parts
        at = self.root
        for part in parents:
            found = at.names[part]
            assert isinstance(found, Directory)
            at = found
        return at, name

    def _change(self, path: str, to: "File | Directory | None") -> None:
        parent, name = self._parent(path)
        parent.change({name: to})

    def _move(self, record: Record) -> None:
        source, old = self._parent(record.path)
        target, new = self._parent(record.other)
        what = source.names[old]
        if record.op is Op.LINK:
            target.change({new: what})
        elif source is target:
            source.change({old: None, new: what})
        else:
            source.change({old: None})
            target.change({new: what})


_MAKERS: dict[Op, Callable[[], "File | Directory"]] = {
    Op.CREATE: File,
    Op.MKDIR: Directory,
}


def _write(what: Directory, path: Path, loss: Loss, rng: random.Random) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, found in what.after(loss, rng).items():
        if isinstance(found, Directory):
            _write(found, path / name, loss, rng)
        else:
            (path / name).write_bytes(found.after(loss, rng))
