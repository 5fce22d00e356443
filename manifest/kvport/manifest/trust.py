"""The allow-list: which keys may do what here, and until when.

* What is not listed is refused; a missing or empty list refuses everything.
* Being listed is not enough: the time, the role, the scope and the model must fit too.
* `scopes` and `models` are sets of names, or `{"*"}` for all of them.

Keys are compared by people when machines are paired; there is no trust on first use.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError, LimitExceededError, UntrustedKeyError
from kvport.manifest.fields import take, take_exact, take_items, take_text
from kvport.manifest.identity import KeyId, fingerprint
from kvport.manifest.keys import PublicKey
from kvport.manifest.limits import TRUST_BYTES, TRUST_NAMES
from kvport.manifest.timestamps import ALWAYS, format_time, parse_time

ANY: Final = frozenset({"*"})
"""As a set of scopes or models: all of them."""

_SCOPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Role(StrEnum):
    """What a key may be used for; no key serves two purposes."""

    EXPORT = "export"
    """Sign artifacts that are imported here."""


def check_scope(label: str) -> str:
    """The label, if it is one.

    Raises:
        FormatError: not 1 to 64 letters, digits, dots, dashes or underscores.
    """
    if not _SCOPE.fullmatch(label):
        raise FormatError("not a scope label")
    return label


@attrs.frozen(kw_only=True)
class TrustEntry:
    """What one key is trusted with.

    Attributes:
        public_key: the key itself; `key_id` follows from it.
        name: for people, never compared.
        not_before: aware; the key is trusted from then on,
        not_after: aware; and no longer from then on.
        roles: what it may sign.
        scopes: labels that its artifacts may carry.
        models: names, as served here, of the models it may bring state for.
    """

    public_key: PublicKey
    name: str
    not_before: datetime = ALWAYS[0]
    not_after: datetime = ALWAYS[1]
    roles: frozenset[Role] = frozenset(Role)
    scopes: frozenset[str] = ANY
    models: frozenset[str] = ANY

    @property
    def key_id(self) -> KeyId:
        """Id of the key."""
        return self.public_key.key_id

    def allows_scope(self, scope: str) -> bool:
        """Whether artifacts may carry this label."""
        return self.scopes == ANY or scope in self.scopes

    def allows_model(self, model: str) -> bool:
        """Whether state for the model of this name may come from the key."""
        return self.models == ANY or model in self.models

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "key_id": self.key_id,
            "models": sorted(self.models),
            "name": self.name,
            "not_after": format_time(self.not_after),
            "not_before": format_time(self.not_before),
            "public_key": self.public_key.raw.hex(),
            "roles": sorted(role.value for role in self.roles),
            "scopes": sorted(self.scopes),
        }

    @classmethod
    def from_json(cls, value: object) -> "TrustEntry":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not an entry.
            WeakKeyError: its key is weak.
        """
        names = [field.name for field in attrs.fields(cls)]
        data = take_exact(value, ["key_id", *names])
        roles = _names(data, "roles")
        if not roles <= frozenset(Role):
            raise FormatError("a trust entry has an unknown role")
        entry = cls(
            public_key=PublicKey(parse_hex32(take(data, "public_key", str))),
            name=take_text(data, "name"),
            not_before=parse_time(take(data, "not_before", str)),
            not_after=parse_time(take(data, "not_after", str)),
            roles=frozenset(map(Role, roles)),
            scopes=_names(data, "scopes"),
            models=_names(data, "models"),
        )
        for scope in entry.scopes - ANY:
            check_scope(scope)
        if data["key_id"] != entry.key_id:
            raise FormatError("a trust entry's key id is not that of its key")
        return entry


@attrs.frozen
class TrustList:
    """Entries, one per key, sorted by key id."""

    entries: tuple[TrustEntry, ...] = ()

    def __attrs_post_init__(self) -> None:
        ids = [entry.key_id for entry in self.entries]
        if ids != sorted(set(ids)):
            raise FormatError("trust entries must be sorted by key id, one per key")

    @classmethod
    def of(cls, entries: Iterable[TrustEntry]) -> "TrustList":
        """From entries in any order.

        Raises:
            FormatError: two entries for one key.
        """
        return cls(tuple(sorted(entries, key=lambda entry: entry.key_id)))

    def allows(self, key_id: KeyId, *, now: datetime, role: Role) -> TrustEntry:
        """The entry under which the key may act in this role at this time.

        The scope and the model are checked on the entry, once they are known.

        Args:
            key_id: the signer.
            now: aware.
            role: what it did.

        Raises:
            UntrustedKeyError: there is none.
        """
        entry = next((e for e in self.entries if e.key_id == key_id), None)
        if entry is None:
            raise UntrustedKeyError(
                f"the signer, {fingerprint(key_id)}, is not in the trust list"
            )
        if not entry.not_before <= now < entry.not_after:
            raise UntrustedKeyError("the signer is not trusted at this time")
        if role not in entry.roles:
            raise UntrustedKeyError("the signer is not trusted in this role")
        return entry

    def to_json(self) -> bytes:
        """Canonical JSON.

        Raises:
            LimitExceededError: longer than `TRUST_BYTES`.
        """
        entries = [entry.to_json() for entry in self.entries]
        data = canonical_dumps({**_HEAD, "entries": entries})
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
        value = take_exact(strict_loads(data), [*_HEAD, "entries"])
        if any(value[name] != expected for name, expected in _HEAD.items()):
            raise FormatError("not a trust list of this version")
        return cls(tuple(map(TrustEntry.from_json, take(value, "entries", list))))


_HEAD: Final[dict[str, Any]] = {"format": "kvport-trust", "format_version": 1}


def _names(data: dict[str, Any], name: str) -> frozenset[str]:
    items = take_items(data, name, TRUST_NAMES)
    if not all(type(item) is str and item and item.isprintable() for item in items):
        raise FormatError(f"{name!r} of a trust entry is not a list of names")
    if items != sorted(set(items)) or ("*" in items and len(items) > 1):
        raise FormatError(f"{name!r} of a trust entry is not in order")
    return frozenset(items)
