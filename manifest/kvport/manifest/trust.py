"""The allow-list: which keys may do what here, until when, and which never again.

* What is not listed is refused; a missing or empty list refuses everything.
* What is revoked is refused before anything else, whoever lists it.
* Entries are the operator's own. Trust documents (trust_documents.py) add to them, as
  long as the operator's entries give all their signers the role `trust`: no more than
  these signers' own scopes, models and time, and never in place of an entry.

Keys are compared by people when machines are paired; there is no trust on first use.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import (
    ExpiredError,
    FormatError,
    LimitExceededError,
    OwnKeyError,
    RevokedKeyError,
    RollbackError,
    SignatureError,
    UnsupportedVersionError,
    UntrustedKeyError,
)
from kvport.manifest.fields import take_exact, take_items
from kvport.manifest.identity import KeyId, fingerprint
from kvport.manifest.limits import CLOCK_SKEW_SECONDS, TRUST_BYTES, TRUST_KEYS
from kvport.manifest.trust_documents import (
    Adopted,
    TrustDocument,
    take_entries,
    take_revoked,
)
from kvport.manifest.trust_entries import (
    ANY,
    Revocation,
    Role,
    TrustEntry,
    check_label,
    check_order,
)

__all__ = [
    "ANY", "Adopted", "Revocation", "Role", "TrustDocument", "TrustEntry", "TrustList",
    "check_label",
]  # fmt: skip

_SKEW: Final = timedelta(seconds=CLOCK_SKEW_SECONDS)
_HEAD: Final[dict[str, Any]] = {"format": "kvport-trust", "format_version": 1}


@attrs.frozen
class TrustList:
    """What a machine believes.

    Attributes:
        entries: by the operator, one per key, sorted by key id.
        revoked: keys that are never believed again, sorted by key id.
        documents: adopted ones, the last of each issuer, sorted by issuer.
    """

    entries: tuple[TrustEntry, ...] = ()
    revoked: tuple[Revocation, ...] = ()
    documents: tuple[Adopted, ...] = ()

    def __attrs_post_init__(self) -> None:
        check_order(self.entries)
        check_order(self.revoked)
        issuers = [document.issuer for document in self.documents]
        if issuers != sorted(set(issuers)):
            raise FormatError("documents must be sorted by issuer, one per issuer")

    @classmethod
    def of(cls, entries: Iterable[TrustEntry]) -> "TrustList":
        """From entries in any order.

        Raises:
            FormatError: two entries for one key.
        """
        return cls(_sorted(entries))

    # Changes: each gives a new list.

    def with_entry(self, entry: TrustEntry) -> "TrustList":
        """The list with this entry, in place of what was said about its key.

        Raises:
            RevokedKeyError: the key is revoked.
        """
        self._check_not_revoked(entry.key_id)
        others = (each for each in self.entries if each.key_id != entry.key_id)
        return attrs.evolve(self, entries=_sorted((*others, entry)))

    def without(self, key_id: KeyId) -> "TrustList":
        """The list without the operator's entry for a key; documents may still list it.

        What is revoked stays so.
        """
        left = (each for each in self.entries if each.key_id != key_id)
        return attrs.evolve(self, entries=tuple(left))

    def revoke(self, revoked: Iterable[Revocation]) -> "TrustList":
        """The list with these keys revoked too, in whatever order it is told.

        Of two that name one key the earlier one stays.
        """
        first = {one.key_id: one for one in sorted([*self.revoked, *revoked])[::-1]}
        return attrs.evolve(self, revoked=tuple(first[name] for name in sorted(first)))

    def adopt(self, envelope: bytes, *, now: datetime, own_key: KeyId) -> "TrustList":
        """The list once it believes a signed trust document.

        Lists with the same entries reach the same list by the same documents, in
        whatever order each issuer's come after each other.

        Args:
            envelope: the received bytes.
            now: aware.
            own_key: of this machine, which no document revokes.

        Raises:
            UnsupportedVersionError: another type of payload, or version.
            RevokedKeyError: a signer is revoked.
            UntrustedKeyError: a signer does not have the role `trust` now.
            SignatureError: a signature does not verify, or the issuer did not sign.
            FormatError: not a trust document in its one form.
            ExpiredError: it has expired, or is from the future.
            RollbackError: a later one of its issuer, or another one of the same
                version, was adopted before.
            OwnKeyError: it revokes this machine's key.
            LimitExceededError: it is too long.
        """
        opened = open_envelope(envelope)
        if opened.payload_type != PayloadType.TRUST:
            raise UnsupportedVersionError("an envelope with another type of payload")
        ids = [signature.key_id for signature in opened.signatures]
        signers = [self.allows(key, now=now, role=Role.TRUST) for key in ids]
        for signature, signer in zip(opened.signatures, signers, strict=True):
            signer.public_key.verify(signature.value, opened.message)
        document = TrustDocument.decode(opened.payload)
        if document.issuer not in ids:
            raise SignatureError("the issuer did not sign")
        if document.created > now + _SKEW:
            raise ExpiredError("the trust document was created in the future")
        if document.expires <= now:
            raise ExpiredError("the trust document has expired")
        if any(one.key_id == own_key for one in document.revoked):
            raise OwnKeyError("the trust document revokes this machine's own key")
        adopted = Adopted.of(document, opened.payload, ids)
        if (before := self.document(document.issuer)) is not None:
            _check_follows(adopted, before)
        others = (each for each in self.documents if each.issuer != adopted.issuer)
        documents = sorted((*others, adopted), key=lambda each: each.issuer)
        return attrs.evolve(self, documents=tuple(documents)).revoke(document.revoked)

    # Questions.

    def allows(self, key_id: KeyId, *, now: datetime, role: Role) -> TrustEntry:
        """The entry under which the key may act in this role at this time.

        The scope and the model are checked on the entry, once they are known.

        Args:
            key_id: the signer.
            now: aware.
            role: what it did.

        Raises:
            RevokedKeyError: the key is revoked.
            UntrustedKeyError: there is no such entry.
        """
        self._check_not_revoked(key_id)
        entry = self.entry(key_id)
        if entry is None:
            raise UntrustedKeyError(
                f"the signer, {fingerprint(key_id)}, is not in the trust list"
            )
        if not entry.not_before <= now < entry.not_after:
            raise UntrustedKeyError("the signer is not trusted at this time")
        if role not in entry.roles:
            raise UntrustedKeyError("the signer is not trusted in this role")
        return entry

    def entry(self, key_id: KeyId) -> TrustEntry | None:
        """What counts for a key: the operator's entry, else one that was given."""
        own = (each for each in self.entries if each.key_id == key_id)
        given = (each for each in self.given if each.key_id == key_id)
        return next(own, None) or next(given, None)

    @property
    def given(self) -> tuple[TrustEntry, ...]:
        """What documents give, within what their signers have; sorted by key id.

        Of several that give one key the one of the issuer with the lowest id counts.
        """
        found: dict[KeyId, TrustEntry] = {}
        for document in self.documents:
            if (signers := self._believed(document)) is None:
                continue
            for entry in document.entries:
                cut = attrs.evolve(
                    entry, not_after=min(entry.not_after, document.expires)
                )
                for signer in signers:
                    cut = cut.within(signer)
                found.setdefault(entry.key_id, cut)
        return tuple(found[key_id] for key_id in sorted(found))

    def document(self, issuer: KeyId) -> Adopted | None:
        """The last document of an issuer, None if there was none."""
        return next((each for each in self.documents if each.issuer == issuer), None)

    @property
    def revoked_keys(self) -> frozenset[KeyId]:
        """Ids of all revoked keys."""
        return frozenset(one.key_id for one in self.revoked)

    # Its file.

    def to_json(self) -> bytes:
        """Canonical JSON.

        Raises:
            LimitExceededError: longer than `TRUST_BYTES`.
        """
        data = canonical_dumps(
            {
                **_HEAD,
                "documents": [document.to_json() for document in self.documents],
                "entries": [entry.to_json() for entry in self.entries],
                "revoked": [one.to_json() for one in self.revoked],
            }
        )
        if len(data) > TRUST_BYTES:
            raise LimitExceededError("the trust list is too long")
        return data

    @classmethod
    def from_json(cls, data: bytes) -> "TrustList":
        """Inverse of `to_json`, refusing everything else.

        Raises:
            FormatError: not a trust list in canonical form.
            LimitExceededError: longer than `TRUST_BYTES`.
            WeakKeyError: one of its keys is weak.
        """
        if len(data) > TRUST_BYTES:
            raise LimitExceededError("the trust list is too long")
        names = [field.name for field in attrs.fields(cls)]
        value = take_exact(strict_loads(data), [*_HEAD, *names])
        if any(value[name] != expected for name, expected in _HEAD.items()):
            raise FormatError("not a trust list of this version")
        documents = take_items(value, "documents", TRUST_KEYS)
        return cls(
            take_entries(value, "entries"),
            take_revoked(value, "revoked"),
            tuple(map(Adopted.from_json, documents)),
        )

    # Internals.

    def _check_not_revoked(self, key_id: KeyId) -> None:
        if key_id in self.revoked_keys:
            raise RevokedKeyError(f"the key {fingerprint(key_id)} is revoked")

    def _believed(self, document: Adopted) -> list[TrustEntry] | None:
        """The operator's entries for all signers; None if one is believed no more."""
        own = {
            entry.key_id: entry
            for entry in self.entries
            if Role.TRUST in entry.roles and entry.key_id not in self.revoked_keys
        }
        if not own.keys() >= set(document.signers):
            return None
        return [own[signer] for signer in document.signers]


def _sorted(entries: Iterable[TrustEntry]) -> tuple[TrustEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.key_id))


def _check_follows(document: Adopted, before: Adopted) -> None:
    if document.version < before.version:
        raise RollbackError(
            f"version {document.version} of the trust document is older than"
            f" {before.version}, which was adopted before"
        )
    if document.version == before.version and document.digest != before.digest:
        raise RollbackError(
            f"another trust document of version {before.version} was adopted before"
        )
