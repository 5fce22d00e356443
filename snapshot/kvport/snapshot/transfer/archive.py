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
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import (
    ContainerError,
    RecipientError,
    UnsupportedVersionError,
)
from kvport.manifest.identity import KeyId
from kvport.manifest.limits import MIB
from kvport.manifest.model import Manifest
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.sealed import SealedManifest
from kvport.manifest.signed import SealedArtifact, SignedManifest
from kvport.manifest.trust import TrustList
from kvport.manifest.ustar import EntryData, EntryFinished, Reader
from kvport.manifest.verified import BlobEntry, VerifiedManifest, VerifiedNode
from kvport.manifest.verify import open_artifact
from kvport.snapshot.transfer.container import Accepted, ContainerReader

_PIECE_BYTES: Final = MIB


@attrs.frozen
class Inspection:
    """What a file claims; nothing of it is verified.

    Attributes:
        envelope: the bytes that say it.
        artifact_id: digest of the payload.
        signers: ids of the keys that are said to have signed.
        manifest: what is said to be signed.
    """

    envelope: bytes = attrs.field(repr=False)
    artifact_id: ArtifactId
    signers: tuple[KeyId, ...]
    manifest: Manifest | SealedManifest


def inspect_file(file: BinaryIO) -> Inspection:
    """Read the envelope of a container.

    Raises:
        ContainerError: the file does not begin like a container.
        FormatError: its envelope or manifest is out of form.
        LimitExceededError: something in it is too large.
    """
    data = _read_envelope(file)
    envelope = open_envelope(data)
    form: type[Manifest | SealedManifest]
    match envelope.payload_type:
        case PayloadType.MANIFEST:
            form = Manifest
        case PayloadType.SEALED:
            form = SealedManifest
        case _:
            raise UnsupportedVersionError("an envelope with another type of payload")
    return Inspection(
        envelope=data,
        artifact_id=artifact_id(envelope.payload),
        signers=tuple(signature.key_id for signature in envelope.signatures),
        manifest=form.from_json(strict_loads(envelope.payload)),
    )


def verify_file(
    file: BinaryIO,
    *,
    trust: TrustList,
    now: datetime,
    own_key: KeyId | None = None,
    recipient: RecipientKey | None = None,
) -> VerifiedManifest | SealedArtifact:
    """Check every byte of a container.

    Args:
        file: positioned at its first byte.
        trust: keys that are believed.
        now: aware.
        own_key: key of the node that it must be for, if it names an audience.
        recipient: key of the node that opens it, if it is sealed.

    Returns:
        What was checked: of a sealed artifact that is not for `recipient`, its outside.

    Raises:
        KvportError: a subclass says what is wrong first.
    """
    return _checked(file, _Checked(trust, now, own_key, recipient)).artifact


def open_file(
    file: BinaryIO,
    *,
    trust: TrustList,
    now: datetime,
    own_key: KeyId | None,
    recipient: RecipientKey,
) -> tuple[VerifiedManifest, bytes]:
    """Check every byte of a container that can be opened here, as `verify_file` does.

    Returns:
        What was checked, and the encoded ids of its prefix.

    Raises:
        RecipientError: it is sealed for others.
        KvportError: another subclass, as of `verify_file`.
    """
    checked = _checked(file, _Checked(trust, now, own_key, recipient))
    if isinstance(checked.artifact, SealedArtifact):
        raise RecipientError("the artifact is not sealed for this machine")
    return checked.artifact, checked.tokens


def _checked(file: BinaryIO, acceptor: "_Checked") -> "_Checked":
    reader = ContainerReader(acceptor)
    for piece in _pieces(file):
        reader.feed(piece)
    reader.finish()
    return acceptor


@attrs.define
class _Checked:
    """Accepts whatever is right, for no model; keeps the tokens and no blob."""

    trust: TrustList
    now: datetime
    own_key: KeyId | None
    recipient: RecipientKey | None
    tokens: bytes = b""
    _result: VerifiedManifest | SealedArtifact | None = None

    @property
    def artifact(self) -> VerifiedManifest | SealedArtifact:
        """What was accepted."""
        if self._result is None:
            raise RuntimeError("a whole container without an envelope")
        return self._result

    def accept(self, envelope: bytes) -> Accepted | SealedArtifact:
        """See `Acceptor`."""
        opened = open_artifact(
            envelope, trust=self.trust, now=self.now, own_key=self.own_key
        )
        if isinstance(opened, SealedArtifact):
            self._result = opened
            return opened
        return self._begin(opened)

    def open(self, sealed: SealedArtifact, private: bytes) -> Accepted | None:
        """See `Acceptor`."""
        if self.recipient is None or not sealed.is_for(self.recipient.public):
            return None
        return self._begin(sealed.open(private, self.recipient))

    def _begin(self, signed: SignedManifest) -> Accepted:
        self._result = verified = signed.fit(None)
        return verified, self

    def begin(self, nodes: Sequence[VerifiedNode], tokens: bytes) -> None:  # noqa: ARG002 - a `Receiver`
        """See `Receiver`."""
        self.tokens = tokens

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
