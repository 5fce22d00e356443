"""Sealing an export: keys of its messages, its private part, and its signed outside.

A message's key follows from the home's sealing secret and from what is sealed, so that
an unchanged blob is the same ciphertext in every export of one home and namespace, and
nothing need be remembered. The salt follows from the key. What is sealed includes how
it is encoded and by which version: a key never sees two plaintexts.

Blobs are sealed twice: for the digests, which are signed, and when they are sent.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import attrs
from blake3 import blake3

from kvport.manifest.arithmetic import PlacedBlob, check_arithmetic
from kvport.manifest.codec import Codec
from kvport.manifest.digests import BlobDigest, derive
from kvport.manifest.domains import Domain, PayloadType
from kvport.manifest.envelope import sign_payload
from kvport.manifest.keys import SigningKey
from kvport.manifest.model import Manifest
from kvport.manifest.recipients import Recipient
from kvport.manifest.sealed import (
    BLOB_CONTEXT,
    TOKENS_CONTEXT,
    Ciphertext,
    PrivatePart,
    SealedManifest,
    Wrap,
    private_context,
)
from kvport.manifest.sealing import (
    MESSAGE_KEY_BYTES,
    SALT_BYTES,
    Sealer,
    seal_message,
)
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.transfer.codec import ENCODER

_TOKENS: Final = "tokens"


@attrs.frozen
class MessageKeys:
    """Where the keys of a namespace's messages come from.

    Attributes:
        secret: the home's, 32 bytes.
        namespace: whose blobs are sealed; the same blob elsewhere has another key.
    """

    secret: bytes = attrs.field(repr=False)
    namespace: Namespace

    def of_blob(self, digest: BlobDigest, codec: Codec) -> bytes:
        """Key of a blob's message."""
        encoder = ENCODER if codec is not Codec.NONE else ""
        return self._key(f"{codec} {encoder}", digest)

    def of_tokens(self, digest: BlobDigest) -> bytes:
        """Key of a token entry's message."""
        return self._key(_TOKENS, digest)

    def private_part(
        self, manifest: Manifest, blobs: Iterable[PlacedBlob]
    ) -> PrivatePart:
        """The private part of an artifact with these blobs, in its order."""
        return PrivatePart(
            manifest,
            self.of_tokens(manifest.prefix.digest),
            tuple(self.of_blob(blob.digest, blob.codec) for blob in blobs),
        )

    def _key(self, what: str, digest: BlobDigest) -> bytes:
        # The rest is of fixed width, the last part is not: no two inputs are alike.
        names = self.namespace.id.encode() + digest + what.encode()
        return derive(Domain.MESSAGE_KEY, self.secret + names)


@attrs.frozen
class Documents:
    """The private part and the token entry, sealed, and what opens the former.

    Attributes:
        private: content of the entry `private.json`.
        tokens: content of the entry `tokens`.
        content_key: of the private part's message, 32 bytes.
    """

    private: bytes = attrs.field(repr=False)
    tokens: bytes = attrs.field(repr=False)
    content_key: bytes = attrs.field(repr=False)


def seal_documents(part: PrivatePart, tokens: bytes, content_key: bytes) -> Documents:
    """The documents of a sealed artifact: the same for the same content key.

    Args:
        part: the plain manifest, and the keys of its messages.
        tokens: its encoded ids.
        content_key: 32 bytes, of this artifact only.

    Raises:
        LimitExceededError: the private part is too long.
    """
    context = private_context(part.manifest.terms.nonce)
    return Documents(
        seal_message(content_key, context, _salt(content_key), part.encode()),
        seal_message(part.tokens_key, TOKENS_CONTEXT, _salt(part.tokens_key), tokens),
        content_key,
    )


def seal_export(
    manifest: Manifest,
    tokens: bytes,
    read: Callable[[PlacedBlob], Iterable[bytes]],
    *,
    keys: MessageKeys,
    recipients: Iterable[Recipient],
    signer: SigningKey,
) -> tuple[bytes, Documents]:
    """Seal a plain artifact: the signed envelope, and its documents.

    Args:
        manifest: its manifest.
        tokens: its encoded ids.
        read: gives the encoded bytes of a blob.
        keys: of its messages.
        recipients: who can open it, each once.
        signer: who signs.

    Raises:
        LimitExceededError: it is more than a sealed artifact may hold.
        KvportError: whatever `read` raises.
    """
    content_key = secrets.token_bytes(MESSAGE_KEY_BYTES)
    blobs = check_arithmetic(manifest)
    part = keys.private_part(manifest, blobs)
    documents = seal_documents(part, tokens, content_key)
    nonce = bytes.fromhex(manifest.terms.nonce)
    wraps = (Wrap(each.key_id, each.wrap(content_key, nonce)) for each in recipients)
    outside = SealedManifest(
        terms=manifest.terms,
        recipients=tuple(sorted(wraps, key=lambda wrap: wrap.recipient)),
        private=_measured([documents.private]),
        tokens=_measured([documents.tokens]),
        blobs=tuple(
            _measured(seal_blob(read(blob), key))
            for blob, key in zip(blobs, part.blob_keys, strict=True)
        ),
    )
    envelope = sign_payload(outside.encode(), [signer], PayloadType.SEALED)
    return envelope, documents


def seal_blob(pieces: Iterable[bytes], key: bytes) -> Iterator[bytes]:
    """The message that holds a blob's encoded bytes; whatever `pieces` raises."""
    sealer = Sealer(key, BLOB_CONTEXT, _salt(key))
    for piece in pieces:
        yield sealer.update(piece)
    yield sealer.finish()


def _salt(key: bytes) -> bytes:
    return derive(Domain.MESSAGE_SALT, key)[:SALT_BYTES]


def _measured(pieces: Iterable[bytes]) -> Ciphertext:
    hasher, size = blake3(), 0
    for piece in pieces:
        hasher.update(piece)
        size += len(piece)
    return Ciphertext(BlobDigest(hasher.digest()), size)
