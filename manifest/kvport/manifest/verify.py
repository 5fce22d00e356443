"""Verification of an artifact: the one way to what may be believed.

Each failure is final, and its code says what failed. In this order:

 1. The envelope is not too large: `limit_exceeded`.
 2. It has its one byte form (envelope.py): `format`.
 3. The payload type is ours: `unsupported_version`.
 4. No signer is revoked: `revoked_key`. Every signer is in the trust list, now, in the
    role `export`: `untrusted_key`; and every signature verifies: `signature`.
 5. The payload is canonical JSON with exactly the fields of its type: `format`.
 6. Format version and kind of artifact are ours: `unsupported_version`. This is looked
    at before the fields, which another version may have others of.
 7. The issuer's key is one of those that verified: `signature`.
 8. The artifact is not from the future, and has not expired: `expired`. It is for this
    node, and of a scope that every signer is trusted with: `wrong_scope`. No key that
    any of its state came from is revoked: `revoked_key`.
    A sealed artifact is opened here, by those it is for (`SealedArtifact.open`): the
    private part has the signed digest: `digest_mismatch`; a wrap is for this machine:
    `wrong_recipient`; wrap and private part open: `decryption`; steps 5 and 6 hold for
    the manifest inside, its terms are those outside: `arithmetic`; and no origin that
    it names is revoked: `revoked_key`.
 9. State identity, tokenizer and block size are those here: `binding_mismatch`, or
    `version_mismatch` if nothing but versions differ and no equivalence pair
    (equivalence.py) covers them. Every signer is trusted with the model here:
    `untrusted_key`.
10. Positions and sizes add up (arithmetic.py), also those of sealed messages:
    `arithmetic`; neither the container nor its blobs are too large: `limit_exceeded`.
11. Size and digest of the token entry, and every key recomputed from it
    (`VerifiedManifest.nodes`): `token_mismatch`; a sealed one opens: `decryption`.

That a session only goes forward (`rollback`) takes memory, and so is the importer's.

Until step 4 has passed, nothing is built from the bytes but the decoded payload.
Nothing here reads a blob, a clock or a file. What follows belongs to the importer:
container, digests and headers of blobs (ustar.py, `BlobLayout.check_header`), and
admission.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from kvport.manifest.canonical import strict_loads
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import Envelope, open_envelope
from kvport.manifest.errors import (
    ExpiredError,
    ScopeError,
    SignatureError,
    UnsupportedVersionError,
)
from kvport.manifest.identity import KeyId
from kvport.manifest.limits import ARTIFACT_BYTES, CLOCK_SKEW_SECONDS
from kvport.manifest.model import Manifest
from kvport.manifest.sealed import SealedManifest
from kvport.manifest.signed import Local, SealedArtifact, Signed, SignedManifest
from kvport.manifest.terms import Terms
from kvport.manifest.trust import Role, TrustEntry, TrustList
from kvport.manifest.verified import PROOF, VerifiedManifest

_SKEW: Final = timedelta(seconds=CLOCK_SKEW_SECONDS)


def open_artifact(
    envelope: bytes,
    *,
    trust: TrustList,
    now: datetime,
    own_key: KeyId | None,
    max_bytes: int = ARTIFACT_BYTES,
) -> SignedManifest | SealedArtifact:
    """Verify an envelope, steps 1 to 8 of the module's list.

    Args:
        envelope: the received bytes.
        trust: this node's allow-list.
        now: aware.
        own_key: this node's key, which an audience must include; None is nobody.
        max_bytes: cap on the container's size, at most `ARTIFACT_BYTES`.

    Raises:
        KvportError: a subclass, by the first step that failed.
    """
    opened = open_envelope(envelope)
    if opened.payload_type not in {PayloadType.MANIFEST, PayloadType.SEALED}:
        raise UnsupportedVersionError("an envelope with another type of payload")
    signers = _check_signatures(opened, trust, now)
    signed = Signed(
        envelope,
        opened,
        signers,
        trust.revoked_keys,
        min(max_bytes, ARTIFACT_BYTES),
    )
    value = strict_loads(opened.payload)
    if opened.payload_type == PayloadType.SEALED:
        sealed = SealedManifest.from_json(value)
        _check_terms(sealed.terms, signers, now, own_key)
        return SealedArtifact(PROOF, sealed, signed)
    manifest = Manifest.from_json(value)
    _check_terms(manifest.terms, signers, now, own_key)
    signed.check_origins(manifest)
    return SignedManifest(PROOF, manifest, signed)


def verify(
    envelope: bytes,
    *,
    trust: TrustList,
    now: datetime,
    local: Local | None,
    own_key: KeyId | None,
    max_bytes: int = ARTIFACT_BYTES,
) -> VerifiedManifest:
    """Verify the envelope of a plain artifact, steps 1 to 10; as of `open_artifact`.

    Raises:
        UnsupportedVersionError: it is sealed.
        KvportError: another subclass, by the first step that failed.
    """
    opened = open_artifact(
        envelope, trust=trust, now=now, own_key=own_key, max_bytes=max_bytes
    )
    if isinstance(opened, SealedArtifact):
        raise UnsupportedVersionError("the artifact is sealed")
    return opened.fit(local)


def _check_signatures(
    opened: Envelope, trust: TrustList, now: datetime
) -> list[TrustEntry]:
    signers = [
        trust.allows(signature.key_id, now=now, role=Role.EXPORT)
        for signature in opened.signatures
    ]
    message = opened.message
    for signature, signer in zip(opened.signatures, signers, strict=True):
        signer.public_key.verify(signature.value, message)
    return signers


def _check_terms(
    terms: Terms,
    signers: Sequence[TrustEntry],
    now: datetime,
    own_key: KeyId | None,
) -> None:
    if all(signer.key_id != terms.issuer.key_id for signer in signers):
        raise SignatureError("the issuer did not sign")
    if terms.created > now + _SKEW:
        raise ExpiredError("the artifact was created in the future")
    if terms.expires <= now:
        raise ExpiredError("the artifact has expired")
    if terms.audience and own_key not in terms.audience:
        raise ScopeError("the artifact was issued for other nodes")
    if not all(signer.allows_scope(terms.scope) for signer in signers):
        raise ScopeError("a signer is not trusted with the artifact's scope")
