"""The container: one strict ustar file, of which every byte but the content is derived.

* Entries in a fixed order; the first is `envelope.json`, whose size alone is taken from
  the file (capped before anything is kept). All others are known from the manifest.
* A 512-byte header follows from name and size, and is compared byte for byte: links,
  paths, owners, times and extensions cannot be expressed.
* Content is padded with zeros to 512 bytes; two zero blocks end the file; nothing
  follows.

`Reader` does no I/O: chunks of any length go in, events come out; content is passed on
as views of the chunk, and at most one header is kept.
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.manifest.errors import ContainerError, LimitExceededError
from kvport.manifest.limits import ENVELOPE_BYTES

BLOCK: Final = 512
TRAILER: Final = bytes(2 * BLOCK)
ENVELOPE_NAME: Final = "envelope.json"
_FIRST: Final = ENVELOPE_NAME.encode() + b"\0"
"""How every container begins."""
TOKENS_NAME: Final = "tokens"
PRIVATE_NAME: Final = "private.json"

_SIZE_LIMIT: Final = 8**11  # eleven octal digits
_NAME: Final = slice(0, 100)
_SIZE: Final = slice(124, 136)
_TYPE: Final = slice(156, 157)
_MAGIC: Final = slice(257, 263)
_OCTAL: Final = re.compile(rb"[0-7]{11}\x00")
_REGULAR: Final = b"0"


@attrs.frozen
class Entry:
    """One file of the container: name and size in bytes."""

    name: str
    size: int


def blob_name(digest: BlobDigest) -> str:
    """Name of a blob's entry."""
    return f"blobs/blake3/{digest.hex()}"


def header(name: str, size: int) -> bytes:
    """The 512 bytes before an entry's content.

    Args:
        name: ASCII, at most 100 bytes.
        size: in bytes, below 8 GiB.

    Raises:
        ContainerError: the name or size has no place in a header.
    """
    if not name.isascii() or not 0 < len(name) <= 100 or not 0 <= size < _SIZE_LIMIT:
        raise ContainerError("an entry's name or size does not fit a ustar header")
    block = b"".join(
        (
            name.encode("ascii").ljust(100, b"\0"),
            b"0000600\0",  # mode
            b"0000000\0" * 2,  # owner, group
            b"%011o\0" % size,
            b"00000000000\0",  # time
            b" " * 8,  # the checksum, taken as spaces in its own sum
            _REGULAR.ljust(101, b"\0"),  # type, then the target of a link
            b"ustar\x0000",
        )
    ).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padding(size: int) -> bytes:
    """The zeros after content of this size."""
    return bytes(-size % BLOCK)


def container_size(entries: Iterable[Entry]) -> int:
    """Bytes of a container with these entries."""
    sizes = (entry.size for entry in entries)
    return sum(BLOCK + size + -size % BLOCK for size in sizes) + len(TRAILER)


@attrs.frozen
class EntryStarted:
    """The entry's header was right; its content follows."""

    entry: Entry


@attrs.frozen
class EntryData:
    """A piece of the current entry's content, valid until the next chunk is fed."""

    data: memoryview


@attrs.frozen
class EntryFinished:
    """All of the entry's content was passed on, and its padding was right."""

    entry: Entry


@attrs.frozen
class ArchiveFinished:
    """The container is complete; any further byte is an error."""


Event = EntryStarted | EntryData | EntryFinished | ArchiveFinished


class _State(Enum):
    HEADER = auto()
    DATA = auto()
    PADDING = auto()
    TRAILER = auto()
    END = auto()


class Reader:
    """Push parser for one container.

    Feed chunks and go through the events of each to the end. When `envelope.json` is
    finished, and before going on, name the remaining entries with `expect`:

        reader = Reader()
        for chunk in chunks:
            for event in reader.feed(chunk):
                ...
        reader.finish()

    After an error the reader is of no further use.
    """

    def __init__(self) -> None:
        self._state = _State.HEADER
        self._left = BLOCK  # bytes until the end of the state
        self._header = bytearray()
        self._entry = Entry(ENVELOPE_NAME, 0)
        self._following: Iterator[Entry] | None = None

    def expect(self, entries: Iterable[Entry]) -> None:
        """Say which entries follow `envelope.json`, in order."""
        if self._following is not None:
            raise RuntimeError("the entries were named before")
        self._following = iter(entries)

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[Event]:
        """Parse the next bytes of the container.

        Yields:
            What the bytes complete, in order; content as views of the chunk.

        Raises:
            ContainerError: a byte is not the one that the format has there.
            LimitExceededError: the envelope is declared too large.
        """
        view = memoryview(chunk).cast("B")
        while view:
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            match self._state:
                case _State.HEADER:
                    self._header += piece
                case _State.DATA:
                    yield EntryData(piece)
                case _State.PADDING | _State.TRAILER:
                    if bytes(piece) != bytes(len(piece)):
                        raise ContainerError("padding or trailer is not zero")
                case _State.END:
                    raise ContainerError("bytes follow the end of the container")
            while self._left == 0 and not self._ended:
                yield from self._leave()

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            ContainerError: the container is not complete.
        """
        if not self._ended:
            if self._following is None and not self._header.startswith(_FIRST):
                raise ContainerError("the file is no kvport artifact")
            raise ContainerError("the container ends too early")

    @property
    def _ended(self) -> bool:
        return self._state is _State.END

    def _leave(self) -> Iterator[Event]:
        """Go on from a state that is complete."""
        match self._state:
            case _State.HEADER:
                self._check_header()
                self._enter(_State.DATA, self._entry.size)
                yield EntryStarted(self._entry)
            case _State.DATA:
                self._enter(_State.PADDING, len(padding(self._entry.size)))
            case _State.PADDING:
                yield EntryFinished(self._entry)
                if self._following is None:
                    raise RuntimeError(
                        "name the entries when envelope.json is finished"
                    )
                if (entry := next(self._following, None)) is None:
                    self._enter(_State.TRAILER, len(TRAILER))
                else:
                    self._entry = entry
                    self._enter(_State.HEADER, BLOCK)
            case _State.TRAILER:
                self._enter(_State.END, 1)
                yield ArchiveFinished()

    def _enter(self, state: _State, left: int) -> None:
        self._state, self._left = state, left

    def _check_header(self) -> None:
        received = bytes(self._header)
        self._header.clear()
        if self._following is None:
            self._entry = Entry(ENVELOPE_NAME, _envelope_size(received))
        derived = header(self._entry.name, self._entry.size)
        if received != derived:
            raise ContainerError(_difference(received, derived))


def _envelope_size(received: bytes) -> int:
    if received[_MAGIC] != b"ustar\0" and not received.startswith(_FIRST):
        raise ContainerError("the file is no kvport artifact")
    if not _OCTAL.fullmatch(received[_SIZE]):
        raise ContainerError("the first entry's size is not in its one form")
    size = int(received[_SIZE][:-1], 8)
    if size > ENVELOPE_BYTES:
        raise LimitExceededError("the envelope is declared too large")
    return size


def _difference(received: bytes, derived: bytes) -> str:
    """What a wrong header looks like, for people: only equality counts."""
    if not any(received):
        return "the container ends where an entry should be"
    if received[_TYPE] != _REGULAR:
        return "an entry is a link, a directory or another special file"
    if received[_NAME] != derived[_NAME]:
        name = received[_NAME].rstrip(b"\0")
        if name.startswith(b"/") or b".." in name or b"\\" in name:
            return "an entry's name is a path"
        return "an entry is not the one that belongs there"
    if received[_SIZE] != derived[_SIZE]:
        return "an entry's size is not the signed one"
    return "an entry's header is not the derived one"
