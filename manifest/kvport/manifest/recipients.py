"""Recipients: X25519 keys, and content keys wrapped for them.

A wrap is HPKE (RFC 9180) in base mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256,
AES-256-GCM; 80 bytes for a 32-byte key. Its `info` names the purpose, the recipient and
the artifact, so that a wrap is of no use elsewhere. Base mode does not say who wrapped:
the manifest that lists the wraps is signed.

A recipient's key opens and does nothing else; no key serves two purposes.
"""

import re
from functools import cached_property
from typing import Final, NewType

import attrs
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from kvport.manifest.digests import derive
from kvport.manifest.domains import Domain
from kvport.manifest.errors import DecryptionError, FormatError, WeakKeyError

RecipientId = NewType("RecipientId", str)
"""`x25519:` and 64 hex digits: derived from a public key."""

WRAP_BYTES: Final = 80
"""Of a wrapped 32-byte key: 32 of encapsulation, 32 of ciphertext, 16 of tag."""

_KEY_BYTES: Final = 32
_P: Final = 2**255 - 19
_ID: Final = re.compile(r"x25519:[0-9a-f]{64}", re.ASCII)
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_ANY_SCALAR: Final = X25519PrivateKey.from_private_bytes(bytes(_KEY_BYTES))


def parse_recipient_id(text: str) -> RecipientId:
    """Check the form of a recipient's id.

    Raises:
        FormatError: any other form, upper case included.
    """
    if not _ID.fullmatch(text):
        raise FormatError("not an x25519 key id")
    return RecipientId(text)


@attrs.frozen(slots=False)
class Recipient:
    """Whom something is sealed for.

    Attributes:
        raw: 32 bytes, the public key of RFC 7748.

    Raises:
        WeakKeyError: the point is of small order, so that anyone could open the wrap.
        FormatError: not 32 bytes, or not the canonical encoding.
    """

    raw: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.raw) != _KEY_BYTES:
            raise FormatError("a recipient's key is not 32 bytes")
        if int.from_bytes(self.raw, "little") >= _P:
            raise FormatError("a recipient's key is not canonically encoded")
        try:
            # Clamped scalars are multiples of 8: points of small order give zero.
            _ANY_SCALAR.exchange(X25519PublicKey.from_public_bytes(self.raw))
        except ValueError as error:
            raise WeakKeyError("a recipient's key is of small order") from error

    @cached_property
    def key_id(self) -> RecipientId:
        """Names the key everywhere; derived, so that it cannot be claimed."""
        return RecipientId(f"x25519:{derive(Domain.RECIPIENT_ID, self.raw).hex()}")

    def wrap(self, content_key: bytes, nonce: bytes) -> bytes:
        """The key, so that only this recipient can read it; 80 bytes, new each time.

        Args:
            content_key: 32 bytes.
            nonce: of the artifact, which the wrap is of no use without.
        """
        public = X25519PublicKey.from_public_bytes(self.raw)
        return _SUITE.encrypt(content_key, public, _info(self, nonce))


@attrs.frozen(slots=False, eq=False)
class RecipientKey:
    """A private key; it appears in no representation of the object."""

    _private: X25519PrivateKey = attrs.field(repr=False)

    @classmethod
    def generate(cls) -> "RecipientKey":
        """A new key from the system's random source."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, private: bytes) -> "RecipientKey":
        """From the 32 bytes of RFC 7748.

        Raises:
            FormatError: not 32 bytes.
        """
        if len(private) != _KEY_BYTES:
            raise FormatError("a recipient's private key is not 32 bytes")
        return cls(X25519PrivateKey.from_private_bytes(private))

    def to_bytes(self) -> bytes:
        """The 32 bytes: a secret."""
        return self._private.private_bytes_raw()

    @cached_property
    def public(self) -> Recipient:
        """What others seal for."""
        return Recipient(self._private.public_key().public_bytes_raw())

    def unwrap(self, wrapped: bytes, nonce: bytes) -> bytes:
        """The content key of a wrap made for this key and an artifact's nonce.

        Raises:
            DecryptionError: in every other case.
        """
        try:
            return _SUITE.decrypt(wrapped, self._private, _info(self.public, nonce))
        except (InvalidTag, ValueError) as error:
            raise DecryptionError("a wrapped key cannot be opened") from error


def _info(recipient: Recipient, nonce: bytes) -> bytes:
    # All of fixed width, but for the last: no two infos are alike.
    return Domain.WRAP.encode() + b"\0" + recipient.raw + nonce
