"""Ed25519 keys: the only algorithm of format v1, and it is not negotiated.

A public key must be the one encoding of a point that is not of small order. Under a
small-order key anyone can make signatures that verify, and `cryptography` loads such
keys; a second encoding of a key would give it a second id.
"""

import re
from functools import cached_property
from typing import Final

import attrs
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from kvport.manifest.digests import derive
from kvport.manifest.domains import Domain
from kvport.manifest.errors import FormatError, SignatureError, WeakKeyError
from kvport.manifest.identity import KeyId

KEY_SIZE: Final = 32

_P: Final = 2**255 - 19
_Y8: Final = int.from_bytes(
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    "little",
)
"""y of a point of order 8."""
_SMALL_ORDER_Y: Final = frozenset({0, 1, _P - 1, _Y8, _P - _Y8})
_KEY_ID: Final = re.compile(r"ed25519:[0-9a-f]{64}", re.ASCII)


def parse_key_id(text: str) -> KeyId:
    """Check the form of a key id.

    Raises:
        FormatError: any other form, upper case included.
    """
    if not _KEY_ID.fullmatch(text):
        raise FormatError("not an ed25519 key id")
    return KeyId(text)


@attrs.frozen(slots=False)
class PublicKey:
    """A verification key.

    Attributes:
        raw: 32 bytes, as RFC 8032 encodes a point.

    Raises:
        WeakKeyError: the point is of small order.
        FormatError: not 32 bytes, or not the canonical encoding.
    """

    raw: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.raw) != KEY_SIZE:
            raise FormatError("a public key is not 32 bytes")
        y = int.from_bytes(self.raw, "little") & ((1 << 255) - 1)
        if y % _P in _SMALL_ORDER_Y:
            raise WeakKeyError("a public key is a point of small order")
        if y >= _P:
            raise FormatError("a public key is not canonically encoded")

    @cached_property
    def key_id(self) -> KeyId:
        """Names the key everywhere; derived, so that it cannot be claimed."""
        return KeyId(f"ed25519:{derive(Domain.KEY_ID, self.raw).hex()}")

    def verify(self, signature: bytes, message: bytes) -> None:
        """Return if the signature is good.

        Raises:
            SignatureError: in every other case.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError) as error:
            raise SignatureError("a signature does not verify") from error


@attrs.frozen(slots=False, eq=False)
class SigningKey:
    """A private key; its seed appears in no representation of the object."""

    _private: Ed25519PrivateKey = attrs.field(repr=False)

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new key from the system's random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, seed: bytes) -> "SigningKey":
        """From the 32-byte seed of RFC 8032.

        Raises:
            FormatError: not 32 bytes.
        """
        if len(seed) != KEY_SIZE:
            raise FormatError("a signing key is not 32 bytes")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def to_bytes(self) -> bytes:
        """The 32-byte seed: a secret."""
        return self._private.private_bytes_raw()

    @cached_property
    def public(self) -> PublicKey:
        """The key that verifies what this one signs."""
        return PublicKey(self._private.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """64 bytes; the same message gives the same signature."""
        return self._private.sign(message)
