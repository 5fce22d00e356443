"""What a trust list says of single keys: entries, and revocations.

* Being listed is not enough: the time, the role, the scope and the model must fit too.
* `scopes` and `models` are sets of names, or `{"*"}` for all of them.
* A revocation is for ever; nothing that is said about the key afterwards counts.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import attrs

from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError
from kvport.manifest.fields import take, take_exact, take_items, take_text
from kvport.manifest.identity import KeyId
from kvport.manifest.keys import PublicKey, parse_key_id
from kvport.manifest.limits import TRUST_NAMES
from kvport.manifest.timestamps import ALWAYS, format_time, parse_time

ANY: Final = frozenset({"*"})
"""As a set of scopes or models: all of them."""

_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Role(StrEnum):
    """What a key may be used for; no key serves two purposes."""

    EXPORT = "export"
    """Sign artifacts that are imported here."""
    TRUST = "trust"
    """Sign trust documents that are believed here; given by command line only."""


def check_label(label: str) -> str:
    """The label, if it is one.

    Raises:
        FormatError: not 1 to 64 letters, digits, dots, dashes or underscores.
    """
    if not _LABEL.fullmatch(label):
        raise FormatError("not a label")
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
    roles: frozenset[Role] = frozenset({Role.EXPORT})
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

    def within(self, other: "TrustEntry") -> "TrustEntry":
        """The entry, with no more scopes, models and time than the other one has."""
        return attrs.evolve(
            self,
            not_before=max(self.not_before, other.not_before),
            not_after=min(self.not_after, other.not_after),
            scopes=_common(self.scopes, other.scopes),
            models=_common(self.models, other.models),
        )

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
            check_label(scope)
        if data["key_id"] != entry.key_id:
            raise FormatError("a trust entry's key id is not that of its key")
        return entry


@attrs.frozen(kw_only=True, order=True)
class Revocation:
    """A key that is not believed any more, whoever says so.

    Attributes:
        key_id: the key.
        at: aware, whole seconds; when it was revoked, for people.
        reason: for people, may be empty.
    """

    key_id: KeyId
    at: datetime
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "at": format_time(self.at),
            "key_id": self.key_id,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, value: object) -> "Revocation":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a revocation.
        """
        data = take_exact(value, ["at", "key_id", "reason"])
        return cls(
            key_id=parse_key_id(take(data, "key_id", str)),
            at=parse_time(take(data, "at", str)),
            reason=take_text(data, "reason"),
        )


def check_order(items: Sequence[TrustEntry] | Sequence[Revocation]) -> None:
    """See that a list is sorted by key id, each key once.

    Raises:
        FormatError: it is not.
    """
    ids = [item.key_id for item in items]
    if ids != sorted(set(ids)):
        raise FormatError("a list of keys must be sorted by key id, each key once")


def _common(mine: frozenset[str], theirs: frozenset[str]) -> frozenset[str]:
    if theirs == ANY:
        return mine
    return theirs if mine == ANY else mine & theirs


def _names(data: dict[str, Any], name: str) -> frozenset[str]:
    items = take_items(data, name, TRUST_NAMES)
    if not all(type(item) is str and item and item.isprintable() for item in items):
        raise FormatError(f"{name!r} of a trust entry is not a list of names")
    if items != sorted(set(items)) or ("*" in items and len(items) > 1):
        raise FormatError(f"{name!r} of a trust entry is not in order")
    return frozenset(items)
