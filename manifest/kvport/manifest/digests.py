"""Digests: plain BLAKE3-256 for blobs, BLAKE3 derive_key for everything structured.

Blob digests are plain, so that `b3sum` can check them. Everything else goes through
`derive`, whose inputs are fixed-width or length-prefixed by the caller.
"""

import re
from typing import Final, NewType

from blake3 import blake3

from kvport.manifest.domains import Domain
from kvport.manifest.errors import FormatError

BlobDigest = NewType("BlobDigest", bytes)
"""32 bytes: BLAKE3 of a blob's bytes."""

Key = NewType("Key", bytes)
"""32 bytes: key(p), the digest of an exact prefix of tokens (see tokens.py)."""

ArtifactId = NewType("ArtifactId", str)
"""`blake3:` and 64 hex digits: digest of a manifest's payload bytes."""

DIGEST_SIZE: Final = 32
_PREFIXED: Final = re.compile(r"blake3:[0-9a-f]{64}", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def derive(domain: Domain, data: bytes) -> bytes:
    """BLAKE3 derive_key of `data` under `domain`, 32 bytes."""
    return blake3(data, derive_key_context=domain.value).digest()


def blob_digest(data: bytes | bytearray | memoryview) -> BlobDigest:
    """Digest of a blob at hand; use `blake3.blake3()` for streams."""
    return BlobDigest(blake3(data).digest())


def format_digest(digest: bytes) -> str:
    """`blake3:<64 hex>`."""
    return f"blake3:{digest.hex()}"


def parse_digest(text: str) -> BlobDigest:
    """Inverse of `format_digest`.

    Raises:
        FormatError: any other form, upper case included.
    """
    if not _PREFIXED.fullmatch(text):
        raise FormatError("not a blake3 digest")
    return BlobDigest(bytes.fromhex(text[7:]))


def parse_hex32(text: str) -> bytes:
    """32 bytes from 64 lower-case hex digits.

    Raises:
        FormatError: any other form.
    """
    if not _HEX.fullmatch(text):
        raise FormatError("not 64 lower-case hex digits")
    return bytes.fromhex(text)


def artifact_id(payload: bytes) -> ArtifactId:
    """Id of the artifact whose manifest payload this is."""
    return ArtifactId(format_digest(blob_digest(payload)))
