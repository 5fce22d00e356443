"""Sealed artifacts around the builder's plain ones, and whatever is made of them."""

import os
from collections.abc import Sequence
from typing import Any

import attrs

from kvport.manifest.digests import blob_digest
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import sign_payload
from kvport.manifest.recipients import Recipient, RecipientKey
from kvport.manifest.sealed import (
    BLOB_CONTEXT,
    TOKENS_CONTEXT,
    Ciphertext,
    PrivatePart,
    SealedManifest,
    Wrap,
    private_context,
)
from kvport.manifest.sealing import seal_message
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.ustar import blob_name
from kvport.manifest.verified import BlobEntry
from kvport.manifest.verify import open_artifact
from tests.manifest.builder import ManifestBuilder, pack

READER = RecipientKey.from_bytes(bytes(range(1, 33)))
CONTENT_KEY, TOKENS_KEY, SALT = b"c" * 32, b"t" * 32, b"s" * 24


@attrs.frozen(kw_only=True)
class SealedBuilder:
    """One sealed artifact; change a part by the methods' arguments."""

    plain: ManifestBuilder = attrs.field(factory=ManifestBuilder)
    recipients: Sequence[Recipient] = (READER.public,)

    def part(self) -> PrivatePart:
        keys = tuple(
            blob_digest(b"key" + entry.digest)
            for entry in self.plain.verified().entries()
            if isinstance(entry, BlobEntry)
        )
        return PrivatePart(self.plain.manifest(), TOKENS_KEY, keys)

    def messages(self, part: PrivatePart | None = None) -> list[bytes]:
        """Private part, tokens and blobs as they stand in the container."""
        part = part or self.part()
        context = private_context(self.plain.manifest().terms.nonce)
        blobs = self.plain.blobs()
        digests = [
            entry.digest
            for entry in self.plain.verified().entries()
            if isinstance(entry, BlobEntry)
        ]
        return [
            seal_message(CONTENT_KEY, context, SALT, part.encode()),
            seal_message(TOKENS_KEY, TOKENS_CONTEXT, SALT, self.plain.token_bytes),
            *(
                seal_message(key, BLOB_CONTEXT, SALT, blobs[digest])
                for key, digest in zip(self.part().blob_keys, digests, strict=True)
            ),
        ]

    def manifest(self, part: PrivatePart | None = None, **other: Any) -> SealedManifest:
        private, tokens, *blobs = (
            Ciphertext(blob_digest(message), len(message))
            for message in self.messages(part)
        )
        terms = self.plain.manifest().terms
        nonce = bytes.fromhex(terms.nonce)
        wraps = (Wrap(r.key_id, r.wrap(CONTENT_KEY, nonce)) for r in self.recipients)
        made = SealedManifest(
            terms=terms,
            recipients=tuple(sorted(wraps, key=lambda wrap: wrap.recipient)),
            private=private,
            tokens=tokens,
            blobs=tuple(blobs),
        )
        return attrs.evolve(made, **other)

    def signed(self, payload: bytes | None = None) -> bytes:
        payload = self.manifest().encode() if payload is None else payload
        return sign_payload(payload, [self.plain.key], PayloadType.SEALED)

    def verified(self, envelope: bytes | None = None, **other: Any) -> SealedArtifact:
        arguments = {
            "trust": self.plain.trust(),
            "now": self.plain.created,
            "own_key": None,
        } | other
        opened = open_artifact(envelope or self.signed(), **arguments)
        assert isinstance(opened, SealedArtifact)
        return opened

    def container(self) -> bytes:
        """The whole file."""
        private, tokens, *blobs = self.messages()
        named = [(blob_name(blob_digest(blob)), blob) for blob in blobs]
        head = [("envelope.json", self.signed())]
        return pack([*head, ("private.json", private), ("tokens", tokens), *named])


def other_reader() -> RecipientKey:
    return RecipientKey.from_bytes(os.urandom(32))
