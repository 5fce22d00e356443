"""Every cap of format v1, with units, in one place (artifact-format 3.3)."""

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30

ENVELOPE_BYTES: Final = 16 * MIB
PAYLOAD_BYTES: Final = 12 * MIB
JSON_DEPTH: Final = 8
"""Nested arrays and objects in a payload."""
SEGMENTS: Final = 16_384
POINTS: Final = 1_024
SIGNATURES: Final = 8
STRING_BYTES: Final = 512
TOKENS: Final = 1 << 20
"""Tokens of one prefix; the token entry has four bytes each."""
BLOB_BYTES: Final = GIB
ARTIFACT_BYTES: Final = 64 * GIB
CACHES: Final = 4_096
"""Cache objects in a layout."""
LEAVES: Final = 64
"""Tensors of one cache object."""
DERIVED_TENSORS: Final = 1 << 18
"""Tensors of all different pairs of class and row count that one manifest has."""
CLOCK_SKEW_SECONDS: Final = 300
BLOCK_TOKENS: Final = 8_192
"""Tokens in a block, at most."""
TABLE_ROWS: Final = 1_024
"""Numerics, or origins, that one manifest may refer to."""
AUDIENCE: Final = 32
SEQUENCE: Final = (1 << 53) - 1
"""Artifacts of one session."""
RECIPIENTS: Final = 32
BLOBS: Final = 2 * SEGMENTS + POINTS
"""Different blobs of one artifact."""
PRIVATE_BYTES: Final = 16 * MIB
"""Of the private part of a sealed artifact, plain."""
TRUST_BYTES: Final = MIB
TRUST_DOCUMENT_BYTES: Final = MIB // 4
TRUST_KEYS: Final = 4_096
"""Entries, revocations, or documents, of one trust list."""
TRUST_NAMES: Final = 1_024
"""Scopes, or models, of one trust entry."""
EQUIVALENCES: Final = 256
"""Pairs of versions that a home accepts."""
EQUIVALENCE_BYTES: Final = MIB
