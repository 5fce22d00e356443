"""Signed artifacts: what passed steps 1 to 8 of verification, and how it goes on.

A `SignedManifest` can be read, and chooses the model that it is for; `fit` holds it to
that model, and gives the one thing that an import goes by. A `SealedArtifact` can be
passed on as it is; `open` gives its recipients the `SignedManifest` inside.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from kvport.manifest.arithmetic import PlacedBlob, check_arithmetic
from kvport.manifest.digests import (
    ArtifactId,
    BlobDigest,
    artifact_id,
    blob_digest,
    format_digest,
    parse_digest,
)
from kvport.manifest.envelope import Envelope
from kvport.manifest.equivalence import NONE, VERSION_FIELDS, Equivalences
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    BindingMismatchError,
    DigestMismatchError,
    LimitExceededError,
    RecipientError,
    RevokedKeyError,
    UntrustedKeyError,
    VersionMismatchError,
)
from kvport.manifest.fields import take, take_count, take_exact, take_text
from kvport.manifest.identity import KeyId, StateIdentity, fingerprint
from kvport.manifest.limits import ARTIFACT_BYTES, BLOCK_TOKENS
from kvport.manifest.model import Manifest
from kvport.manifest.recipients import Recipient, RecipientKey
from kvport.manifest.sealed import PrivatePart, SealedManifest, Wrap, private_context
from kvport.manifest.sealing import open_message, sealed_size
from kvport.manifest.trust import TrustEntry
from kvport.manifest.ustar import (
    ENVELOPE_NAME,
    PRIVATE_NAME,
    TOKENS_NAME,
    Entry,
    blob_name,
    container_size,
)
from kvport.manifest.verified import (
    PROOF,
    BlobEntry,
    Seal,
    SealedEntry,
    VerifiedManifest,
)


@attrs.frozen
class Local:
    """What an artifact must fit here.

    Attributes:
        identity: of the model as loaded here.
        tokenizer: digest of its tokenizer's files.
        block_size: tokens in a block.
        model: the name under which it is served here, which trust entries refer to.
        equivalences: other versions whose state is taken for that of `identity`.
    """

    identity: StateIdentity
    tokenizer: BlobDigest
    block_size: int
    model: str
    equivalences: Equivalences = NONE

    def mismatched_fields(self, manifest: Manifest) -> list[str]:
        """Names of what an artifact does not fit, in a fixed order."""
        theirs = manifest.identity
        fields = list(theirs.mismatched_fields(self.identity))
        if self.equivalences.cover(theirs, self.identity):
            fields = []
        if manifest.tokenizer != self.tokenizer:
            fields.append("tokenizer")
        if manifest.block_size != self.block_size:
            fields.append("block_size")
        return fields

    def to_json(self) -> dict[str, Any]:
        """The JSON form, without equivalences."""
        return {
            "block_size": self.block_size,
            "identity": self.identity.to_json(),
            "model": self.model,
            "tokenizer": format_digest(self.tokenizer),
        }

    @classmethod
    def from_json(cls, value: object) -> "Local":
        """Inverse of `to_json`.

        Raises:
            FormatError: the value is none.
            LimitExceededError: a number is too large.
        """
        data = take_exact(value, ["block_size", "identity", "model", "tokenizer"])
        return cls(
            StateIdentity.from_json(data["identity"]),
            parse_digest(take(data, "tokenizer", str)),
            take_count(data, "block_size", BLOCK_TOKENS),
            take_text(data, "model"),
        )


@attrs.frozen
class Signed:
    """What stages share: the opened envelope, and who signed it.

    Attributes:
        data: the received bytes of the envelope.
        opened: its parts.
        signers: the trust entries under which its signatures verified.
        revoked: keys that state must not come from.
        max_bytes: cap on the container's size.
    """

    data: bytes = attrs.field(repr=False)
    opened: Envelope = attrs.field(repr=False)
    signers: Sequence[TrustEntry]
    revoked: frozenset[KeyId]
    max_bytes: int

    def check_origins(self, manifest: Manifest) -> None:
        """See that no part of the state comes from a revoked key.

        Raises:
            RevokedKeyError: some does.
        """
        if found := sorted(manifest.origins & self.revoked):
            raise RevokedKeyError(
                f"state in it came from the key {fingerprint(found[0])}, which is"
                " revoked"
            )

    @property
    def artifact_id(self) -> ArtifactId:
        """Digest of the signed payload."""
        return artifact_id(self.opened.payload)


@attrs.frozen(init=False)
class SignedManifest:
    """A manifest that passed steps 1 to 8."""

    manifest: Manifest
    _signed: Signed
    _sealed: "_Sealed | None"

    def __init__(
        self,
        proof: object,
        manifest: Manifest,
        signed: Signed,
        sealed: "_Sealed | None" = None,
    ) -> None:
        if proof is not PROOF:
            raise TypeError("a signed manifest comes from verification")
        self.__attrs_init__(manifest, signed, sealed)

    def fit(self, local: Local | None) -> VerifiedManifest:
        """Steps 9 and 10.

        Args:
            local: what the state must fit; None for an inspection without a model,
                which leaves out step 9.

        Raises:
            UntrustedKeyError: a signer is not trusted with the model.
            BindingMismatchError: the state is of another identity.
            ArithmeticMismatchError: positions or sizes do not add up.
            LimitExceededError: container or blobs are too large.
        """
        signed = self._signed
        if local is not None:
            _check_local(self.manifest, signed.signers, local)
        blobs = check_arithmetic(self.manifest)
        entries = self._entries(blobs)
        if container_size(entries) > signed.max_bytes:
            raise LimitExceededError("the artifact is too large")
        if sum(blob.layout.size for blob in blobs) > ARTIFACT_BYTES:
            raise LimitExceededError("the artifact's blobs are too large")
        return VerifiedManifest(
            PROOF,
            manifest=self.manifest,
            artifact=signed.artifact_id,
            payload=signed.opened.payload,
            envelope=signed.data,
            entries=entries,
            tokens_key=self._sealed.keys.tokens_key if self._sealed else None,
            admitted_as=self.manifest.identity if local is None else local.identity,
        )

    def _entries(self, blobs: Sequence[PlacedBlob]) -> tuple[Entry, ...]:
        if self._sealed is not None:
            return self._sealed.entries(self.manifest, blobs)
        return (
            Entry(ENVELOPE_NAME, len(self._signed.data)),
            Entry(TOKENS_NAME, self.manifest.prefix.size),
            *(
                BlobEntry(
                    blob_name(blob.digest),
                    blob.encoded_size,
                    blob.digest,
                    blob.layout,
                    blob.codec,
                )
                for blob in blobs
            ),
        )


@attrs.frozen(init=False)
class SealedArtifact:
    """A sealed artifact's public part that passed steps 1 to 8.

    Attributes:
        sealed: what was signed.
        size: bytes of the whole container.
    """

    sealed: SealedManifest
    size: int
    _signed: Signed
    _entries: tuple[Entry, ...] = attrs.field(repr=False)

    def __init__(self, proof: object, sealed: SealedManifest, signed: Signed) -> None:
        if proof is not PROOF:
            raise TypeError("a sealed artifact comes from verification")
        entries = (
            Entry(ENVELOPE_NAME, len(signed.data)),
            SealedEntry(PRIVATE_NAME, sealed.private.size, sealed.private.digest),
            SealedEntry(TOKENS_NAME, sealed.tokens.size, sealed.tokens.digest),
            *(
                SealedEntry(blob_name(blob.digest), blob.size, blob.digest)
                for blob in sealed.blobs
            ),
        )
        size = container_size(entries)
        if size > signed.max_bytes:
            raise LimitExceededError("the artifact is too large")
        self.__attrs_init__(sealed, size, signed, entries)

    @property
    def artifact_id(self) -> ArtifactId:
        """Digest of the signed payload."""
        return self._signed.artifact_id

    def entries(self) -> tuple[Entry, ...]:
        """The container's entries: envelope, private part, tokens, blobs."""
        return self._entries

    def is_for(self, recipient: Recipient) -> bool:
        """Whether this key is one of the recipients'."""
        return self._wrap_for(recipient) is not None

    def open(self, private: bytes, key: RecipientKey) -> SignedManifest:
        """The manifest inside.

        Args:
            private: content of the entry `private.json`.
            key: of one of the recipients.

        Raises:
            DigestMismatchError: the bytes are not those that were signed.
            RecipientError: the artifact is sealed for others.
            RevokedKeyError: state inside comes from a revoked key.
            DecryptionError: the wrap or the private part cannot be opened.
            FormatError: what is inside is out of form, or contradicts the outside.
            LimitExceededError: what is inside is too large.
        """
        if (wrap := self._wrap_for(key.public)) is None:
            raise RecipientError("the artifact is not sealed for this machine")
        nonce = bytes.fromhex(self.sealed.terms.nonce)
        return self.open_with(private, key.unwrap(wrap.wrapped, nonce))

    def open_with(self, private: bytes, content_key: bytes) -> SignedManifest:
        """The manifest inside, by the content key itself; errors as of `open`."""
        sealed = self.sealed
        if blob_digest(private) != sealed.private.digest:
            raise DigestMismatchError("the private part is not the signed one")
        context = private_context(sealed.terms.nonce)
        keys = PrivatePart.decode(open_message(content_key, context, private))
        if keys.manifest.terms != sealed.terms:
            raise ArithmeticMismatchError("the terms inside are not those outside")
        self._signed.check_origins(keys.manifest)
        return SignedManifest(PROOF, keys.manifest, self._signed, _Sealed(self, keys))

    def _wrap_for(self, recipient: Recipient) -> Wrap | None:
        wraps = (w for w in self.sealed.recipients if w.recipient == recipient.key_id)
        return next(wraps, None)


@attrs.frozen
class _Sealed:
    """Where a manifest was: the outside, and the keys."""

    outside: SealedArtifact
    keys: PrivatePart

    def entries(
        self, manifest: Manifest, blobs: Sequence[PlacedBlob]
    ) -> tuple[Entry, ...]:
        """The outside's entries, with what is in them.

        Raises:
            ArithmeticMismatchError: the outside has other messages.
        """
        outside, sealed = self.outside.entries(), self.outside.sealed
        if len(blobs) != len(sealed.blobs) or len(blobs) != len(self.keys.blob_keys):
            raise ArithmeticMismatchError("there are not as many messages as blobs")
        sizes = [manifest.prefix.size, *(blob.encoded_size for blob in blobs)]
        messages = [sealed.tokens, *sealed.blobs]
        if [message.size for message in messages] != list(map(sealed_size, sizes)):
            raise ArithmeticMismatchError("a message has not the size of its content")
        return (
            *outside[:3],
            *(
                BlobEntry(
                    blob_name(message.digest),
                    message.size,
                    blob.digest,
                    blob.layout,
                    blob.codec,
                    Seal(key, message.digest),
                )
                for message, blob, key in zip(
                    sealed.blobs, blobs, self.keys.blob_keys, strict=True
                )
            ),
        )


def _check_local(
    manifest: Manifest, signers: Sequence[TrustEntry], local: Local
) -> None:
    if not all(signer.allows_model(local.model) for signer in signers):
        raise UntrustedKeyError("a signer is not trusted with this model")
    if fields := local.mismatched_fields(manifest):
        only_versions = VERSION_FIELDS.issuperset(fields)
        kind = VersionMismatchError if only_versions else BindingMismatchError
        raise kind(f"the state does not fit here: {', '.join(fields)}", fields=fields)
