"""Every domain-separation string of format v1, in one table.

A context names one purpose and one version; no two hash inputs of different purpose
can ever collide.
"""

from enum import StrEnum


class Domain(StrEnum):
    """Contexts of BLAKE3 derive_key, but for those of sealing.

    `WRAP` begins the `info` of HPKE (recipients.py); `SEALED_...` begin the contexts of
    sealed messages (sealed.py).
    """

    KEY_ID = "kvport/v1/key-id"
    MODEL_FILES = "kvport/v1/model-files"
    TOKENIZER_FILES = "kvport/v1/tokenizer-files"
    STATE_IDENTITY = "kvport/v1/state-identity"
    KEY_ROOT = "kvport/v1/key-root"
    KEY = "kvport/v1/key"
    NODE = "kvport/v1/node"
    NAMESPACE = "kvport/v1/namespace"
    NUMERICS = "kvport/v1/numerics"
    RECIPIENT_ID = "kvport/v1/recipient-id"
    MESSAGE_KEY = "kvport/v1/message-key"
    MESSAGE_SALT = "kvport/v1/message-salt"
    WRAP = "kvport/v1/wrap"
    SEALED_PRIVATE = "kvport/v1/sealed/private"
    SEALED_TOKENS = "kvport/v1/sealed/tokens"
    SEALED_BLOB = "kvport/v1/sealed/blob"


class PayloadType(StrEnum):
    """DSSE payload types: one per kind of signed document."""

    MANIFEST = "application/vnd.kvport.manifest.v1+json"
    SEALED = "application/vnd.kvport.sealed.v1+json"
    TRUST = "application/vnd.kvport.trust.v1+json"
