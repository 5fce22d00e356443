"""Reading a container: the one state machine behind import and offline verification.

In: chunks of bytes, of any length. Out: calls of a `Receiver`, each after all that it
rests on was checked: the envelope, and the private part of a sealed artifact, by an
`Acceptor`; then the token entry with every key; then blob by blob header, content and
digest, of the plain bytes. What a receiver was given of a blob is right only once
`end_blob` is called; the artifact only once `finish` returned.

A sealed artifact that nobody opens is checked from outside: sizes and digests of all
messages.

At most the envelope, the private part, the token entry and one blob's header are held
in memory, each within the format's limits, and all but the first within what was
signed; and of a blob that is sealed or encoded, a few MiB (incoming.py).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from blake3 import blake3

from kvport.manifest.errors import DigestMismatchError
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.ustar import (
    PRIVATE_NAME,
    Entry,
    EntryData,
    EntryFinished,
    EntryStarted,
    Reader,
)
from kvport.manifest.verified import (
    BlobEntry,
    SealedEntry,
    VerifiedManifest,
    VerifiedNode,
)
from kvport.snapshot.transfer.incoming import IncomingBlob


class Receiver(Protocol):
    """What is done with an artifact while it is read."""

    def begin(self, nodes: Sequence[VerifiedNode], tokens: bytes) -> None:
        """The path is named and its tokens are right; its blobs follow."""

    def begin_blob(self, entry: BlobEntry) -> None:
        """A blob with this digest is claimed to follow."""

    def add(self, data: memoryview) -> None:
        """Some of its bytes, valid during the call."""

    def end_blob(self) -> None:
        """All of it was passed on, and it has its header and digest."""


Accepted: TypeAlias = tuple[VerifiedManifest, Receiver]


class Acceptor(Protocol):
    """Decides whether to go on with an artifact, or raises what is wrong with it."""

    def accept(self, envelope: bytes) -> Accepted | SealedArtifact:
        """Verify an envelope; say who is told of the rest, unless it is sealed."""

    def open(self, sealed: SealedArtifact, private: bytes) -> Accepted | None:
        """Open a sealed artifact; None to have it checked from outside only."""


class ContainerReader:
    """Checks one container; after an error it is of no further use."""

    def __init__(self, acceptor: Acceptor) -> None:
        """A reader at byte 0."""
        self._acceptor = acceptor
        self._reader = Reader()
        self._sealed: SealedArtifact | None = None
        self._accepted: Accepted | None = None
        # What the entries hold, in step with the reader once they are known.
        self._contents: Iterator[Entry] = iter(())
        self._content = Entry("", 0)
        self._kept = bytearray()  # of a document
        self._blob: IncomingBlob | None = None
        self._hasher = blake3()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Check the next bytes of the container.

        Raises:
            KvportError: a subclass; the first byte that is wrong, or what the acceptor
                or the receiver raised.
        """
        for event in self._reader.feed(chunk):
            match event:
                case EntryStarted(entry):
                    self._content = next(self._contents, entry)
                    self._begin()
                case EntryData(data):
                    self._take(data)
                case EntryFinished():
                    self._end()

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            ContainerError: the container is not complete.
        """
        self._reader.finish()

    def _begin(self) -> None:
        self._hasher = blake3()
        if isinstance(self._content, BlobEntry):
            self._blob = IncomingBlob(self._content)
            self._receiver.begin_blob(self._content)

    def _take(self, data: memoryview) -> None:
        if self._blob is not None:
            for piece in self._blob.feed(data):
                self._receiver.add(piece)
            return
        if isinstance(self._content, SealedEntry):
            self._hasher.update(data)
        if self._is_document:
            self._kept += data

    def _end(self) -> None:
        if self._blob is not None:
            for piece in self._blob.finish():
                self._receiver.add(piece)
            self._blob = None
            self._receiver.end_blob()
            return
        content = self._content
        if isinstance(content, SealedEntry) and self._hasher.digest() != content.digest:
            raise DigestMismatchError("a message does not have the signed digest")
        data = bytes(self._kept)
        self._kept.clear()
        if self._sealed is None and self._accepted is None:
            self._end_envelope(data)
        elif self._sealed is not None and content.name == PRIVATE_NAME:
            if accepted := self._acceptor.open(self._sealed, data):
                self._accepted = accepted
                self._contents = iter(accepted[0].entries()[2:])
        elif self._accepted is not None:
            verified, receiver = self._accepted
            tokens = verified.token_bytes(data)
            receiver.begin(verified.nodes(tokens), tokens)

    def _end_envelope(self, data: bytes) -> None:
        accepted = self._acceptor.accept(data)
        if isinstance(accepted, SealedArtifact):
            self._sealed = accepted
            following = accepted.entries()[1:]
        else:
            self._accepted = accepted
            following = accepted[0].entries()[1:]
        self._contents = iter(following)
        self._reader.expect(following)

    @property
    def _is_document(self) -> bool:
        """Whether the entry is kept whole: not a message that nobody opens."""
        content = self._content
        is_message = isinstance(content, SealedEntry) and content.name != PRIVATE_NAME
        return not is_message or self._accepted is not None

    @property
    def _receiver(self) -> Receiver:
        if self._accepted is None:
            raise RuntimeError("a blob before the envelope")
        return self._accepted[1]
