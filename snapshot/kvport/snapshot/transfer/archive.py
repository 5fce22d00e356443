"""A `.kvport` file without a server: what it says, and whether it is right.

Neither needs mlx, a model or a cache. `inspect_file` believes the file and reads its
envelope only; `verify_file` checks every byte, just as an import does.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import BinaryIO, Final

import attrs

from kvport.manifest.canonical import strict_loads
from kvport.manifest.digests import ArtifactId, artifact_id
from kvport.manifest.domains import PAYLOAD_TYPE
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import ContainerError, UnsupportedVersionError
from kvport.manifest.identity import KeyId
from kvport.manifest.limits import MIB
from kvport.manifest.model import Manifest
from kvport.manifest.trust import TrustList
from kvport.manifest.ustar import EntryData, EntryFinished, Reader
from kvport.manifest.verify import BlobEntry, VerifiedManifest, VerifiedNode, verify
from kvport.snapshot.transfer.container import ContainerReader, Receiver

_PIECE_BYTES: Final = MIB


@attrs.frozen
class Inspection:
    """What a file claims; nothing of it is verified.

    Attributes:
        artifact_id: digest of the payload.
        signers: ids of the keys that are said to have signed.
        manifest: what is said to be signed.
    """

    artifact_id: ArtifactId
    signers: tuple[KeyId, ...]
    manifest: Manifest


def inspect_file(file: BinaryIO) -> Inspection:
    """Read the envelope of a container.

    Raises:
        ContainerError: the file does not begin like a container.
        FormatError: its envelope or manifest is out of form.
        LimitExceededError: something in it is too large.
    """
    envelope = open_envelope(_read_envelope(file))
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UnsupportedVersionError("an envelope with another type of payload")
    return Inspection(
        artifact_id=artifact_id(envelope.payload),
        signers=tuple(signature.key_id for signature in envelope.signatures),
        manifest=Manifest.from_json(strict_loads(envelope.payload)),
    )


def verify_file(
    file: BinaryIO, *, trust: TrustList, now: datetime, own_key: KeyId | None = None
) -> VerifiedManifest:
    """Check every byte of a container.

    Args:
        file: positioned at its first byte.
        trust: keys that are believed.
        now: aware.
        own_key: key of the node that it must be for, if it names an audience.

    Raises:
        KvportError: a subclass says what is wrong first.
    """
    accepted: list[VerifiedManifest] = []

    def accept(envelope: bytes) -> tuple[VerifiedManifest, Receiver]:
        accepted.append(
            verify(envelope, trust=trust, now=now, local=None, own_key=own_key)
        )
        return accepted[0], _Dropped()

    reader = ContainerReader(accept)
    for piece in _pieces(file):
        reader.feed(piece)
    reader.finish()
    return accepted[0]


class _Dropped:
    """A receiver that keeps nothing."""

    def begin(self, nodes: Sequence[VerifiedNode], tokens: bytes) -> None:
        """See `Receiver`."""

    def begin_blob(self, entry: BlobEntry) -> None:
        """See `Receiver`."""

    def add(self, data: memoryview) -> None:
        """See `Receiver`."""

    def end_blob(self) -> None:
        """See `Receiver`."""


def _read_envelope(file: BinaryIO) -> bytes:
    reader, envelope = Reader(), bytearray()
    for piece in _pieces(file):
        for event in reader.feed(piece):
            match event:
                case EntryData(data):
                    envelope += data
                case EntryFinished():
                    return bytes(envelope)
    reader.finish()
    raise ContainerError("the container ends too early")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece
