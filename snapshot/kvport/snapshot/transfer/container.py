"""Reading a container: the one state machine behind import and offline verification.

In: chunks of bytes, of any length. Out: calls of a `Receiver`, each after all that it
rests on was checked: the envelope by `accept`, then the token entry with every key,
then blob by blob header, content and digest, of the decoded bytes. What a receiver was
given of a blob is right only once `end_blob` is called; the artifact only once `finish`
returned.

At most the envelope, the token entry and one blob's header are held in memory, each
within the format's limits, and the last two within what was signed; and of a blob that
is encoded, a few MiB (codec.py).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from blake3 import blake3

from kvport.manifest.codec import Codec
from kvport.manifest.errors import DigestMismatchError
from kvport.manifest.ustar import (
    EntryData,
    EntryFinished,
    EntryStarted,
    Reader,
)
from kvport.manifest.verify import BlobEntry, VerifiedManifest, VerifiedNode
from kvport.snapshot.transfer.codec import Decoder


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


class ContainerReader:
    """Checks one container; after an error it is of no further use."""

    def __init__(
        self, accept: Callable[[bytes], tuple[VerifiedManifest, Receiver]]
    ) -> None:
        """A reader at byte 0.

        Args:
            accept: verifies the envelope's bytes, or raises what is wrong with them,
                and says who is told of the rest.
        """
        self._accept = accept
        self._reader = Reader()
        self._accepted: tuple[VerifiedManifest, Receiver] | None = None
        self._kept = bytearray()  # envelope, token entry, or the blob's header
        self._blob: BlobEntry | None = None
        self._decoder: Decoder | None = None
        self._hasher = blake3()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Check the next bytes of the container.

        Raises:
            KvportError: a subclass; the first byte that is wrong, or what `verify` or
                the receiver raised.
        """
        for event in self._reader.feed(chunk):
            match event:
                case EntryStarted(BlobEntry() as entry):
                    self._begin_blob(entry)
                case EntryData(data) if self._decoder is not None:
                    for piece in self._decoder.feed(data):
                        self._add(memoryview(piece))
                case EntryData(data) if self._blob is not None:
                    self._add(data)
                case EntryData(data):
                    self._kept += data
                case EntryFinished(BlobEntry() as entry):
                    self._end_blob(entry)
                case EntryFinished():
                    self._end_document()

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            ContainerError: the container is not complete.
        """
        self._reader.finish()

    def _end_document(self) -> None:
        data = bytes(self._kept)
        self._kept.clear()
        if self._accepted is None:
            verified, receiver = self._accepted = self._accept(data)
            self._reader.expect(verified.entries()[1:])
        else:
            verified, receiver = self._accepted
            receiver.begin(verified.nodes(data), data)

    def _begin_blob(self, entry: BlobEntry) -> None:
        self._blob = entry
        if entry.codec is Codec.SHUFFLE_ZSTD:
            self._decoder = Decoder(entry.layout)
        self._hasher = blake3()
        self._receiver.begin_blob(entry)

    def _add(self, data: memoryview) -> None:
        if self._blob is None:
            raise RuntimeError("bytes without a blob")
        layout = self._blob.layout
        # The header first: bytes of another form are not worth writing.
        if (missing := len(layout.header) - len(self._kept)) > 0:
            self._kept += data[:missing]
            if len(data) >= missing:
                layout.check_header(bytes(self._kept))
        self._hasher.update(data)
        self._receiver.add(data)

    def _end_blob(self, entry: BlobEntry) -> None:
        if self._decoder is not None:
            self._decoder.finish()
            self._decoder = None
        if self._hasher.digest() != entry.digest:
            raise DigestMismatchError("a blob does not have the signed digest")
        self._blob = None
        self._kept.clear()
        self._receiver.end_blob()

    @property
    def _receiver(self) -> Receiver:
        if self._accepted is None:
            raise RuntimeError("a blob before the envelope")
        return self._accepted[1]
