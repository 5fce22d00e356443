"""Trust documents: what one machine tells others about keys, signed.

    {"created","entries","expires","format","format_version","issuer","revoked",
     "version"}                             canonical JSON, the payload of an envelope

* Entries are those of a trust list, with the role `export` and no other: who may sign
  documents, only the operator of each machine says.
* The version rises with each document of an issuer. Who has seen one takes no lower
  one, so that nobody can bring back what was taken back.
* A document replaces what its issuer gave before. What it revokes stays revoked: an
  issuer lists all that it ever revoked, so that the last document says it all.

`TrustList.adopt` (trust.py) decides what a document counts for.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import (
    BlobDigest,
    blob_digest,
    format_digest,
    parse_digest,
)
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import sign_payload
from kvport.manifest.errors import (
    FormatError,
    LimitExceededError,
    UnsupportedVersionError,
)
from kvport.manifest.fields import take, take_count, take_exact, take_items
from kvport.manifest.identity import KeyId
from kvport.manifest.keys import SigningKey, parse_key_id
from kvport.manifest.limits import (
    SEQUENCE,
    SIGNATURES,
    TRUST_DOCUMENT_BYTES,
    TRUST_KEYS,
)
from kvport.manifest.timestamps import format_time, parse_time
from kvport.manifest.trust_entries import Revocation, Role, TrustEntry, check_order

FORMAT: Final = "kvport-trust-document"
FORMAT_VERSION: Final = 1

_FIELDS: Final = (
    "created", "entries", "expires", "format", "format_version", "issuer", "revoked",
    "version",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class TrustDocument:
    """What an issuer says about keys.

    Attributes:
        issuer: one of the keys that sign it.
        version: rises with each document of the issuer, from 1.
        created: aware, whole seconds.
        expires: aware, whole seconds; its entries end with it, revocations do not.
        entries: keys that may export, sorted by key id.
        revoked: keys that nobody shall believe, sorted by key id.
    """

    issuer: KeyId
    version: int
    created: datetime
    expires: datetime
    entries: tuple[TrustEntry, ...] = ()
    revoked: tuple[Revocation, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.version < 1:
            raise FormatError("a trust document's version is at least 1")
        check_given(self.entries)
        check_order(self.revoked)

    def encode(self) -> bytes:
        """The payload: canonical JSON.

        Raises:
            LimitExceededError: longer than `TRUST_DOCUMENT_BYTES`.
        """
        data = canonical_dumps(
            {
                "created": format_time(self.created),
                "entries": [entry.to_json() for entry in self.entries],
                "expires": format_time(self.expires),
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "issuer": self.issuer,
                "revoked": [one.to_json() for one in self.revoked],
                "version": self.version,
            }
        )
        if len(data) > TRUST_DOCUMENT_BYTES:
            raise LimitExceededError("the trust document is too long")
        return data

    def sign(self, signers: Sequence[SigningKey]) -> bytes:
        """The document in its envelope.

        Raises:
            FormatError: no signer, or one twice.
            LimitExceededError: too many signers, or it is too long.
        """
        return sign_payload(self.encode(), signers, PayloadType.TRUST)

    @classmethod
    def decode(cls, payload: bytes) -> "TrustDocument":
        """Inverse of `encode`, refusing everything else.

        Raises:
            UnsupportedVersionError: another format version.
            FormatError: not a trust document in canonical form.
            LimitExceededError: it is too long.
            WeakKeyError: one of its keys is weak.
        """
        if len(payload) > TRUST_DOCUMENT_BYTES:
            raise LimitExceededError("the trust document is too long")
        value = strict_loads(payload)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise FormatError("not a trust document")
        if take(value, "format_version", int) != FORMAT_VERSION:
            raise UnsupportedVersionError("a trust document of another version")
        data = take_exact(value, _FIELDS)
        return cls(
            issuer=parse_key_id(take(data, "issuer", str)),
            version=take_count(data, "version", SEQUENCE),
            created=parse_time(take(data, "created", str)),
            expires=parse_time(take(data, "expires", str)),
            entries=take_entries(data, "entries"),
            revoked=take_revoked(data, "revoked"),
        )


@attrs.frozen(kw_only=True)
class Adopted:
    """What a trust list keeps of a document that it believed.

    Attributes:
        issuer: whose it is.
        version: the highest one seen of the issuer.
        digest: of its payload.
        signers: keys that signed it, sorted; all of them must be believed still.
        expires: when its entries end.
        entries: as the document has them.
    """

    issuer: KeyId
    version: int
    digest: BlobDigest
    signers: tuple[KeyId, ...]
    expires: datetime
    entries: tuple[TrustEntry, ...]

    @classmethod
    def of(
        cls, document: TrustDocument, payload: bytes, signers: Sequence[KeyId]
    ) -> "Adopted":
        """From a document whose signatures were verified."""
        return cls(
            issuer=document.issuer,
            version=document.version,
            digest=blob_digest(payload),
            signers=tuple(signers),
            expires=document.expires,
            entries=document.entries,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "digest": format_digest(self.digest),
            "entries": [entry.to_json() for entry in self.entries],
            "expires": format_time(self.expires),
            "issuer": self.issuer,
            "signers": list(self.signers),
            "version": self.version,
        }

    @classmethod
    def from_json(cls, value: object) -> "Adopted":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not an adopted document.
            LimitExceededError: it is too long.
            WeakKeyError: one of its keys is weak.
        """
        data = take_exact(value, [field.name for field in attrs.fields(cls)])
        signers = tuple(map(_key_id, take_items(data, "signers", SIGNATURES)))
        issuer = parse_key_id(take(data, "issuer", str))
        if list(signers) != sorted(set(signers)) or issuer not in signers:
            raise FormatError("an adopted document's signers are not in order")
        entries = take_entries(data, "entries")
        check_given(entries)
        version = take_count(data, "version", SEQUENCE)
        if version < 1:
            raise FormatError("an adopted document's version is at least 1")
        return cls(
            issuer=issuer,
            version=version,
            digest=parse_digest(take(data, "digest", str)),
            signers=signers,
            expires=parse_time(take(data, "expires", str)),
            entries=entries,
        )


def check_given(entries: Sequence[TrustEntry]) -> None:
    """See that a document may hold these entries.

    Raises:
        FormatError: they are out of order, or one has another role than `export`.
    """
    check_order(entries)
    if any(entry.roles != frozenset({Role.EXPORT}) for entry in entries):
        raise FormatError("a trust document gives the role `export` and no other")


def take_entries(data: dict[str, Any], name: str) -> tuple[TrustEntry, ...]:
    """A field that is a list of entries; errors as of `TrustEntry.from_json`."""
    return tuple(map(TrustEntry.from_json, take_items(data, name, TRUST_KEYS)))


def take_revoked(data: dict[str, Any], name: str) -> tuple[Revocation, ...]:
    """A field that is a list of revocations; errors as of `Revocation.from_json`."""
    return tuple(map(Revocation.from_json, take_items(data, name, TRUST_KEYS)))


def _key_id(value: object) -> KeyId:
    if not isinstance(value, str):
        raise FormatError("a signer is not a key id")
    return parse_key_id(value)
