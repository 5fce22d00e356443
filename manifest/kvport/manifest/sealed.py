"""Sealed artifacts: what stands outside, and the private part inside.

Outside, signed and for everyone on the way: terms, recipients, and digest and size of
every ciphertext. Inside, for recipients: the whole plain manifest and the keys.

    envelope.json               the public payload, signed
    private.json                `PrivatePart`, sealed under the content key
    tokens                      the token entry, sealed
    blobs/blake3/<digest>       blobs by the digest of their ciphertext, sealed after
                                their codec, in the order of the manifest

Sealed first and signed after: whoever holds no key still checks every byte, and
recipients cannot be exchanged. The public payload says nothing about the text but its
length, through sizes. Digests and keys of plain bytes stay inside: from them anyone
could confirm a guess.

Contexts of the messages (sealing.py) are a domain; that of the private part and the
artifact's nonce. Salts are whatever the exporter chose.
"""

from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import (
    BlobDigest,
    format_digest,
    parse_digest,
    parse_hex32,
)
from kvport.manifest.domains import Domain
from kvport.manifest.errors import FormatError, LimitExceededError
from kvport.manifest.fields import take, take_count, take_exact, take_items
from kvport.manifest.limits import (
    BLOB_BYTES,
    BLOBS,
    JSON_DEPTH,
    PRIVATE_BYTES,
    RECIPIENTS,
    TOKENS,
)
from kvport.manifest.model import FORMAT, FORMAT_VERSION, Manifest, check_version
from kvport.manifest.recipients import WRAP_BYTES, RecipientId, parse_recipient_id
from kvport.manifest.sealing import sealed_size
from kvport.manifest.terms import TERMS_FIELDS, Terms
from kvport.manifest.tokens import TOKEN_SIZE

SEALED_KIND: Final = "sealed"
BLOB_CONTEXT: Final = Domain.SEALED_BLOB.encode()
TOKENS_CONTEXT: Final = Domain.SEALED_TOKENS.encode()

_FIELDS: Final = (
    *TERMS_FIELDS, "artifact_kind", "blobs", "format", "format_version", "private",
    "recipients", "tokens",
)  # fmt: skip


def private_context(nonce: str) -> bytes:
    """Context of the private part of the artifact with this nonce."""
    return Domain.SEALED_PRIVATE.encode() + b"\0" + bytes.fromhex(nonce)


@attrs.frozen
class Ciphertext:
    """One sealed message: digest and size of its bytes in the container."""

    digest: BlobDigest
    size: int

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {"digest": format_digest(self.digest), "size": self.size}

    @classmethod
    def from_json(cls, value: object, limit: int) -> "Ciphertext":
        """Decode one whose plain bytes are at most `limit`.

        Raises:
            FormatError: the value is not one.
            LimitExceededError: it is too large.
        """
        data = take_exact(value, ["digest", "size"])
        return cls(
            parse_digest(take(data, "digest", str)),
            take_count(data, "size", sealed_size(limit)),
        )


@attrs.frozen
class Wrap:
    """The content key, wrapped for one recipient; 80 bytes."""

    recipient: RecipientId
    wrapped: bytes

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {"key_id": self.recipient, "wrap": self.wrapped.hex()}

    @classmethod
    def from_json(cls, value: object) -> "Wrap":
        """Decode.

        Raises:
            FormatError: the value is not a wrap.
        """
        data = take_exact(value, ["key_id", "wrap"])
        text = take(data, "wrap", str)
        try:
            wrapped = bytes.fromhex(text)
        except ValueError as error:
            raise FormatError("a wrap is not hex") from error
        if len(wrapped) != WRAP_BYTES or wrapped.hex() != text:
            raise FormatError("a wrap is not 160 lower-case hex digits")
        return cls(parse_recipient_id(take(data, "key_id", str)), wrapped)


@attrs.frozen(kw_only=True)
class SealedManifest:
    """The public payload of a sealed artifact.

    Attributes:
        terms: who issued it, for whom, and until when.
        recipients: one wrap per recipient, sorted by key id.
        private: the sealed private part.
        tokens: the sealed token entry.
        blobs: sealed blobs in the container's order, each once.
    """

    terms: Terms
    recipients: tuple[Wrap, ...]
    private: Ciphertext
    tokens: Ciphertext
    blobs: tuple[Ciphertext, ...]

    def encode(self) -> bytes:
        """The payload: canonical JSON."""
        return canonical_dumps(
            {
                **self.terms.to_json(),
                "artifact_kind": SEALED_KIND,
                "blobs": [blob.to_json() for blob in self.blobs],
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "private": self.private.to_json(),
                "recipients": [wrap.to_json() for wrap in self.recipients],
                "tokens": self.tokens.to_json(),
            }
        )

    @classmethod
    def from_json(cls, value: object) -> "SealedManifest":
        """Decode, refusing unknown and missing fields.

        Raises:
            UnsupportedVersionError: another version or kind of artifact.
            FormatError: the value is not the public payload of a sealed artifact.
            LimitExceededError: a count or size is above the format's limits.
        """
        check_version(value, SEALED_KIND)
        data = take_exact(value, _FIELDS)
        wraps = tuple(map(Wrap.from_json, take_items(data, "recipients", RECIPIENTS)))
        ids = [wrap.recipient for wrap in wraps]
        if not ids or ids != sorted(set(ids)):
            raise FormatError("recipients must be sorted by key id, one wrap per key")
        blobs = tuple(
            Ciphertext.from_json(item, BLOB_BYTES)
            for item in take_items(data, "blobs", BLOBS)
        )
        if len({blob.digest for blob in blobs}) != len(blobs):
            raise FormatError("a sealed blob is listed twice")
        return cls(
            terms=Terms.from_json(data),
            recipients=wraps,
            private=Ciphertext.from_json(data["private"], PRIVATE_BYTES),
            tokens=Ciphertext.from_json(data["tokens"], TOKENS * TOKEN_SIZE),
            blobs=blobs,
        )


@attrs.frozen
class PrivatePart:
    """What only recipients read.

    Attributes:
        manifest: the plain manifest; its blobs are those that were sealed.
        tokens_key: key of the token entry's message, 32 bytes.
        blob_keys: keys of the blobs' messages in the container's order.
    """

    manifest: Manifest
    tokens_key: bytes = attrs.field(repr=False)
    blob_keys: tuple[bytes, ...] = attrs.field(repr=False)

    def encode(self) -> bytes:
        """Canonical JSON.

        Raises:
            LimitExceededError: longer than `PRIVATE_BYTES`.
        """
        keys = {
            "blobs": [key.hex() for key in self.blob_keys],
            "tokens": self.tokens_key.hex(),
        }
        value = {"keys": keys, "manifest": self.manifest.to_json()}
        data = canonical_dumps(value, depth=JSON_DEPTH + 1)
        if len(data) > PRIVATE_BYTES:
            raise LimitExceededError("the private part is too long")
        return data

    @classmethod
    def decode(cls, data: bytes) -> "PrivatePart":
        """Inverse of `encode`, refusing everything else.

        Raises:
            UnsupportedVersionError: the manifest is of another version or kind.
            FormatError: not a private part in canonical form.
            LimitExceededError: a count or size is above the format's limits.
        """
        value = strict_loads(data, depth=JSON_DEPTH + 1)
        whole = take_exact(value, ["keys", "manifest"])
        keys = take_exact(whole["keys"], ["blobs", "tokens"])
        return cls(
            Manifest.from_json(whole["manifest"]),
            parse_hex32(take(keys, "tokens", str)),
            tuple(map(_key, take_items(keys, "blobs", BLOBS))),
        )


def _key(value: object) -> bytes:
    if not isinstance(value, str):
        raise FormatError("a blob's key is not a string")
    return parse_hex32(value)
