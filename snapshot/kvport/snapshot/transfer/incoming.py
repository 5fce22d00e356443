"""Blobs on their way in: from the content of an entry to a blob's own bytes, checked.

In: the content of one entry, in chunks. Out: the blob's plain bytes, in pieces. Sealed
ones are opened, then encoded ones decoded. The header is looked at first, since bytes
of another form are not worth writing; all that was given out is right only once
`finish` has ended. The header and a few MiB at most are held.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blake3 import blake3

from kvport.manifest.codec import Codec
from kvport.manifest.errors import DigestMismatchError
from kvport.manifest.sealed import BLOB_CONTEXT
from kvport.manifest.sealing import Opener
from kvport.manifest.verified import BlobEntry
from kvport.snapshot.errors import LibraryMissingError

if TYPE_CHECKING:
    from kvport.snapshot.transfer.codec import Decoder


class IncomingBlob:
    """One blob; after an error it is of no further use."""

    def __init__(self, entry: BlobEntry) -> None:
        self._entry = entry
        self._opener = Opener(entry.seal.key, BLOB_CONTEXT) if entry.seal else None
        self._decoder = _decoder(entry)
        self._message = blake3()
        self._plain = blake3()
        self._header = bytearray()

    def feed(self, data: memoryview) -> Iterator[memoryview]:
        """Take the entry's next bytes; yields the blob's.

        Raises:
            DecryptionError: they are not of the message that was sealed.
            EncodedBlobError: they are not those of a frame of this blob.
            TensorHeaderError: the blob's header is not the derived one.
        """
        if self._opener is None:
            yield from self._decoded(data)
        else:
            self._message.update(data)
            yield from self._decoded(self._opener.update(data))

    def finish(self) -> Iterator[memoryview]:
        """Say that there are no more bytes; yields the rest of the blob's.

        Raises:
            DecryptionError: the message is not complete.
            EncodedBlobError: the frame is not complete.
            TensorHeaderError: the blob's header is not the derived one.
            DigestMismatchError: the message or the blob is not the signed one.
        """
        entry = self._entry
        if self._opener is not None and entry.seal is not None:
            yield from self._decoded(self._opener.finish())
            if self._message.digest() != entry.seal.digest:
                raise DigestMismatchError("a message does not have the signed digest")
        if self._decoder is not None:
            self._decoder.finish()
        if self._plain.digest() != entry.digest:
            raise DigestMismatchError("a blob does not have the signed digest")

    def _decoded(self, data: memoryview | bytes) -> Iterator[memoryview]:
        if self._decoder is None:
            yield self._checked(memoryview(data))
        else:
            for piece in self._decoder.feed(memoryview(data)):
                yield self._checked(memoryview(piece))

    def _checked(self, data: memoryview) -> memoryview:
        layout = self._entry.layout
        if (missing := len(layout.header) - len(self._header)) > 0:
            self._header += data[:missing]
            if len(data) >= missing:
                layout.check_header(bytes(self._header))
        self._plain.update(data)
        return data


def _decoder(entry: BlobEntry) -> "Decoder | None":
    if entry.codec is Codec.NONE:
        return None
    try:
        # What is not compressed is verified where there is no zstandard.
        from kvport.snapshot.transfer.codec import Decoder  # noqa: PLC0415
    except ImportError as error:
        raise LibraryMissingError("the file is compressed: zstandard is missing") from (
            error
        )
    return Decoder(entry.layout)
