"""Sealed messages, wraps and private parts, for the independent verifier.

Written from docs/format.md, section 8, with HMAC, AES-GCM and X25519 only.
"""

import hashlib
import hmac
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.vectors.independent_fields import PRIVATE, kdf, load, need, refuse, typed


def expand(key: bytes, info: bytes, size: int, algorithm: str) -> bytes:
    out, block = b"", b""
    while len(out) < size:
        number = bytes([len(out) // hashlib.new(algorithm).digest_size + 1])
        block = hmac.digest(key, block + info + number, algorithm)
        out += block
    return out[:size]


def open_gcm(key: bytes, nonce: bytes, data: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(nonce, data, None)
    except (InvalidTag, ValueError):
        refuse("decryption")


def open_message(key: bytes, context: bytes, data: bytes) -> bytes:
    label = b"c2sp.org/chunked-encryption@v1+AEAD_AES_256_GCM\0"
    need(len(data) >= 56 + 16, "decryption")
    derived = expand(key, label + data[:24] + context, 76, "sha512")
    need(hmac.compare_digest(derived[44:], data[24:56]), "decryption")
    base, rest, plain = int.from_bytes(derived[32:44], "big"), data[56:], []
    chunks = (len(rest) - 16) // (16384 + 16) + 1
    for i in range(chunks):
        chunk = rest[i * 16400 : (i + 1) * 16400]
        nonce = (base ^ i).to_bytes(12, "big")
        plain.append(open_gcm(derived[:32], nonce, chunk))
    need(len(plain[-1]) < 16384, "decryption")
    return b"".join(plain)


def unwrap(wrap: bytes, private: X25519PrivateKey, nonce: bytes) -> bytes:
    """HPKE, RFC 9180, base mode."""
    mine = private.public_key().public_bytes_raw()
    enc, sealed = wrap[:32], wrap[32:]
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(enc))
    except ValueError:
        refuse("decryption")

    def extract(suite: bytes, salt: bytes, label: bytes, data: bytes) -> bytes:
        return hmac.digest(salt, b"HPKE-v1" + suite + label + data, "sha256")

    def labeled(
        suite: bytes, key: bytes, label: bytes, info: bytes, size: int
    ) -> bytes:
        head = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label
        return expand(key, head + info, size, "sha256")

    kem, suite = b"KEM\0\x20", b"HPKE\0\x20\0\1\0\2"
    eae = extract(kem, b"", b"eae_prk", shared)
    secret = labeled(kem, eae, b"shared_secret", enc + mine, 32)
    info = b"kvport/v1/wrap\0" + mine + nonce
    context = b"\0" + extract(suite, b"", b"psk_id_hash", b"")
    context += extract(suite, b"", b"info_hash", info)
    secret = extract(suite, secret, b"secret", b"")
    key = labeled(suite, secret, b"key", context, 32)
    return open_gcm(key, labeled(suite, secret, b"base_nonce", context, 12), sealed)


def open_private(value: Any, data: bytes, key: X25519PrivateKey) -> Any:
    """Step 8a: the private part."""
    mine = "x25519:" + kdf("recipient-id", key.public_key().public_bytes_raw()).hex()
    wraps = {each["key_id"]: each["wrap"] for each in value["recipients"]}
    need(mine in wraps, "wrong_recipient")
    nonce = bytes.fromhex(value["nonce"])
    content_key = unwrap(bytes.fromhex(wraps[mine]), key, nonce)
    context = b"kvport/v1/sealed/private\0" + nonce
    part = load(open_message(content_key, context, data), depth=9)
    PRIVATE(part)
    typed(part["manifest"], "prefix")
    for field in ("audience", "created", "expires", "issuer", "nonce", "scope"):
        need(part["manifest"][field] == value[field], "arithmetic")
    return part
