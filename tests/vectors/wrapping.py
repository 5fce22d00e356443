"""HPKE with a chosen ephemeral key, so that vectors are the same bytes each time.

Base mode of RFC 9180: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM; the library
draws the ephemeral key itself. Never for anything but vectors.
"""

import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvport.manifest.recipients import Recipient
from kvport.manifest.sealed import Wrap

_KEM, _SUITE = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x02"


def wrap(recipient: Recipient, content_key: bytes, nonce: bytes) -> Wrap:
    """The content key for this recipient: the same each time."""
    seed = hashlib.sha256(b"ephemeral" + recipient.raw + nonce + content_key).digest()
    ephemeral = X25519PrivateKey.from_private_bytes(seed)
    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(recipient.raw))
    public = ephemeral.public_key().public_bytes_raw()
    key, base_nonce = _schedule(
        _expand(
            _KEM,
            _extract(_KEM, b"", b"eae_prk", shared),
            b"shared_secret",
            public + recipient.raw,
            32,
        ),
        b"kvport/v1/wrap\0" + recipient.raw + nonce,
    )
    sealed = AESGCM(key).encrypt(base_nonce, content_key, None)
    return Wrap(recipient.key_id, public + sealed)


def _schedule(shared: bytes, info: bytes) -> tuple[bytes, bytes]:
    context = b"\0" + b"".join(
        _extract(_SUITE, b"", label, data)
        for label, data in ((b"psk_id_hash", b""), (b"info_hash", info))
    )
    secret = _extract(_SUITE, shared, b"secret", b"")
    return (
        _expand(_SUITE, secret, b"key", context, 32),
        _expand(_SUITE, secret, b"base_nonce", context, 12),
    )


def _extract(suite: bytes, salt: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(salt, b"HPKE-v1" + suite + label + data, "sha256")


def _expand(suite: bytes, key: bytes, label: bytes, info: bytes, size: int) -> bytes:
    head = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(key, head + b"\x01", "sha256")[:size]
