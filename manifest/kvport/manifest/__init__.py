"""The format of kvport artifacts: pure, without I/O, clock, mlx or web framework."""

from kvport.manifest.envelope import sign_payload
from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, Numerics, StateIdentity
from kvport.manifest.keys import PublicKey, SigningKey
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.model import Manifest
from kvport.manifest.signed import Local
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.verified import VerifiedManifest
from kvport.manifest.verify import verify

__all__ = [
    "BlobClass",
    "KeyId",
    "KvportError",
    "Local",
    "Manifest",
    "Numerics",
    "PublicKey",
    "SigningKey",
    "StateIdentity",
    "StateLayout",
    "TrustEntry",
    "TrustList",
    "VerifiedManifest",
    "sign_payload",
    "verify",
]
