"""Trust lists with documents and revocations, for vectors and mutants."""

from datetime import timedelta
from typing import Any

import attrs

from kvport.manifest.keys import SigningKey
from kvport.manifest.trust import (
    Revocation,
    Role,
    TrustDocument,
    TrustEntry,
    TrustList,
)
from tests.manifest.builder import KEY, NOW, OTHER_KEY

ADMIN = SigningKey.from_bytes(bytes(range(64, 96)))
LOST = SigningKey.from_bytes(bytes(range(96, 128)))
GIVEN = TrustEntry(public_key=KEY.public, name="mac-a")
DOCUMENT = TrustDocument(
    issuer=ADMIN.public.key_id,
    version=7,
    created=NOW,
    expires=NOW + timedelta(days=30),
    entries=(GIVEN,),
    revoked=(Revocation(key_id=LOST.public.key_id, at=NOW, reason="lost"),),
)


def listed(**limits: Any) -> TrustEntry:
    """The operator's entry for the document's signer."""
    fields: dict[str, Any] = {"roles": frozenset({Role.TRUST}), "name": "admin"}
    return TrustEntry(public_key=ADMIN.public, **fields | limits)


def given(document: TrustDocument = DOCUMENT, **limits: Any) -> TrustList:
    """A list that adopted the document, and trusts its signer within limits."""
    entry = listed(roles=frozenset({Role.TRUST}))
    adopting = TrustList.of([entry])
    envelope = document.sign([ADMIN])
    adopted = adopting.adopt(envelope, now=NOW, own_key=OTHER_KEY.public.key_id)
    return attrs.evolve(adopted, entries=(listed(**limits),))


FULL = given().with_entry(TrustEntry(public_key=OTHER_KEY.public, name="mac-b"))
"""One entry of the operator's beside."""


def revoking(trust: TrustList, key: SigningKey) -> TrustList:
    """The list with a key revoked."""
    return trust.revoke([Revocation(key_id=key.public.key_id, at=NOW)])
