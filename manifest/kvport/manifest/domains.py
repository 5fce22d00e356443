"""Every domain-separation string of format v1, in one table.

A context names one purpose and one version; no two hash inputs of different purpose
can ever collide. Contexts are BLAKE3 `derive_key` contexts.
"""

from enum import StrEnum
from typing import Final


class Domain(StrEnum):
    """BLAKE3 derive_key contexts."""

    KEY_ID = "kvport/v1/key-id"
    MODEL_FILES = "kvport/v1/model-files"
    TOKENIZER_FILES = "kvport/v1/tokenizer-files"
    STATE_IDENTITY = "kvport/v1/state-identity"
    KEY_ROOT = "kvport/v1/key-root"
    KEY = "kvport/v1/key"
    NODE = "kvport/v1/node"
    NAMESPACE = "kvport/v1/namespace"
    NUMERICS = "kvport/v1/numerics"


PAYLOAD_TYPE: Final = "application/vnd.kvport.manifest.v1+json"
