"""Sealing: one chunked-AEAD message per blob.

A message is Cobblestone-256 of C2SP chunked-encryption, version 1: HKDF-Expand-SHA-512
of key, salt and context gives an AES-256-GCM key, a base nonce and a commitment to all
three. Chunks of 16 KiB follow under the base nonce XOR their number; the last one is
shorter, and may be empty.

    salt (24) | commitment (32) | ciphertext (16,384) tag (16) | ... | ciphertext tag

Chunks that were cut off, exchanged, repeated or appended are refused, and so are
another key and another context. `Opener` gives out whole chunks that were
authenticated; that none is missing is known at its end.

`Sealer` takes the salt from its caller, where the library's encryptor draws one, so
that the same blob is the same ciphertext from export to export. A key and a salt must
never be used for two plaintexts.
"""

from typing import Final

import attrs
from cryptography.cobblestone import Cobblestone256Decryptor
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvport.manifest.errors import DecryptionError

MESSAGE_KEY_BYTES: Final = 32
SALT_BYTES: Final = 24
CHUNK_BYTES: Final = 16 * 1024

_NONCE_BYTES: Final = 12
_COMMITMENT_BYTES: Final = 32
TAG_BYTES: Final = 16
_SEALED_BYTES: Final = CHUNK_BYTES + TAG_BYTES
_HEADER_BYTES: Final = SALT_BYTES + _COMMITMENT_BYTES
_LABEL: Final = b"c2sp.org/chunked-encryption@v1+AEAD_AES_256_GCM\0"


def sealed_size(size: int) -> int:
    """Bytes of the message that holds `size` bytes."""
    return _HEADER_BYTES + size + (size // CHUNK_BYTES + 1) * TAG_BYTES


class Sealer:
    """Writes one message."""

    def __init__(self, key: bytes, context: bytes, salt: bytes) -> None:
        """Start a message.

        Args:
            key: 32 secret, uniform bytes.
            context: what the message is; whoever opens it must say the same.
            salt: 24 bytes.
        """
        if len(key) != MESSAGE_KEY_BYTES or len(salt) != SALT_BYTES:
            raise ValueError("a key has 32 bytes, a salt 24")
        size = MESSAGE_KEY_BYTES + _NONCE_BYTES + _COMMITMENT_BYTES
        derived = HKDFExpand(SHA512(), size, _LABEL + salt + context).derive(key)
        self._cipher = AESGCM(derived[:MESSAGE_KEY_BYTES])
        nonce = derived[MESSAGE_KEY_BYTES:-_COMMITMENT_BYTES]
        self._base_nonce = int.from_bytes(nonce, "big")
        self._chunks = 0
        self._header = salt + derived[-_COMMITMENT_BYTES:]
        self._held = bytearray()  # of the chunk that is not whole yet
        self._room = bytearray()  # for what is given out

    def update(self, data: bytes | bytearray | memoryview) -> bytes:
        """The part of the message that `data` completes."""
        rest = memoryview(data).cast("B")
        chunks = (len(self._held) + len(rest)) // CHUNK_BYTES
        written, at = self._start(chunks * _SEALED_BYTES)
        for _ in range(chunks):
            chunk, rest = self._next_chunk(rest)
            self._seal(chunk, written[at : at + _SEALED_BYTES])
            at += _SEALED_BYTES
        self._held += rest
        return bytes(written)

    def finish(self) -> bytes:
        """The rest of the message; the sealer is of no further use."""
        written, at = self._start(len(self._held) + TAG_BYTES)
        self._seal(self._held, written[at:])
        return bytes(written)

    def _start(self, size: int) -> tuple[memoryview, int]:
        """Room for so many bytes behind the header, and where they begin.

        It is used again: joining new objects, and new memory, take several times as
        long as sealing does.
        """
        header, self._header = self._header, b""
        whole = len(header) + size
        if whole > len(self._room):
            self._room = bytearray(whole)
        self._room[: len(header)] = header
        return memoryview(self._room)[:whole], len(header)

    def _next_chunk(
        self, rest: memoryview
    ) -> tuple[bytearray | memoryview, memoryview]:
        """A whole chunk, and what is left behind it."""
        if not self._held:
            return rest[:CHUNK_BYTES], rest[CHUNK_BYTES:]
        chunk, self._held = self._held, bytearray()
        missing = CHUNK_BYTES - len(chunk)
        chunk += rest[:missing]
        return chunk, rest[missing:]

    def _seal(self, chunk: bytearray | memoryview, into: memoryview) -> None:
        nonce = (self._base_nonce ^ self._chunks).to_bytes(_NONCE_BYTES, "big")
        self._chunks += 1
        self._cipher.encrypt_into(nonce, chunk, None, into)


@attrs.frozen(init=False)
class Opener:
    """Reads one message; after an error it is of no further use."""

    _decryptor: Cobblestone256Decryptor

    def __init__(self, key: bytes, context: bytes) -> None:
        """Start with a key of 32 bytes and the context that it was sealed with."""
        self.__attrs_init__(Cobblestone256Decryptor(key, context))

    def update(self, data: bytes | bytearray | memoryview) -> bytes:
        """The plaintext of all chunks that `data` completes.

        Raises:
            DecryptionError: a chunk, the key or the context is not the right one.
        """
        try:
            return self._decryptor.update(data)
        except (InvalidTag, ValueError) as error:
            raise DecryptionError("a sealed message cannot be opened") from error

    def finish(self) -> bytes:
        """The rest of the plaintext.

        Raises:
            DecryptionError: likewise, or chunks are missing.
        """
        try:
            return self._decryptor.finalize()
        except (InvalidTag, ValueError) as error:
            raise DecryptionError("a sealed message cannot be opened") from error


def seal_message(key: bytes, context: bytes, salt: bytes, data: bytes) -> bytes:
    """A message at one go; arguments as of `Sealer`."""
    sealer = Sealer(key, context, salt)
    return sealer.update(data) + sealer.finish()


def open_message(key: bytes, context: bytes, message: bytes) -> bytes:
    """The plaintext of a message at hand.

    Raises:
        DecryptionError: as of `Opener`.
    """
    opener = Opener(key, context)
    return opener.update(message) + opener.finish()
