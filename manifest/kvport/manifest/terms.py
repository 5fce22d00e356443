"""The terms of an artifact: who issued it, for whom, and until when.

A plain artifact's manifest states them, and so does a sealed one's public payload, from
which everyone on the way can tell whether to go on.
"""

import re
from datetime import datetime
from typing import Any, Final

import attrs

from kvport.manifest.errors import FormatError
from kvport.manifest.fields import take, take_exact, take_text
from kvport.manifest.identity import KeyId
from kvport.manifest.keys import parse_key_id
from kvport.manifest.limits import AUDIENCE
from kvport.manifest.parts import take_key_ids
from kvport.manifest.timestamps import format_time, parse_time
from kvport.manifest.trust import check_label

TERMS_FIELDS: Final = ("audience", "created", "expires", "issuer", "nonce", "scope")
"""Fields of the JSON objects that terms are part of."""

_NONCE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@attrs.frozen
class Issuer:
    """Who made the artifact: a key that signed it, and a name for people."""

    key_id: KeyId
    name: str


@attrs.frozen(kw_only=True)
class Terms:
    """What an artifact's issuer says about it as a whole.

    Attributes:
        scope: label that the exporter gave.
        issuer: who made it.
        created: aware, whole seconds.
        expires: aware, whole seconds; admitted state does not expire with it.
        nonce: 32 hex digits.
        audience: key ids of the nodes it is for, sorted; empty for anyone.
    """

    scope: str
    issuer: Issuer
    created: datetime
    expires: datetime
    nonce: str
    audience: tuple[KeyId, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields `TERMS_FIELDS` of an object."""
        return {
            "audience": list(self.audience),
            "created": format_time(self.created),
            "expires": format_time(self.expires),
            "issuer": attrs.asdict(self.issuer),
            "nonce": self.nonce,
            "scope": self.scope,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Terms":
        """Decode these fields of an object.

        Raises:
            FormatError: one of them is out of form.
            LimitExceededError: the audience is too large.
        """
        nonce = take(data, "nonce", str)
        if not _NONCE.fullmatch(nonce):
            raise FormatError("the nonce is out of form")
        return cls(
            scope=check_label(take(data, "scope", str)),
            issuer=_issuer(data["issuer"]),
            created=parse_time(take(data, "created", str)),
            expires=parse_time(take(data, "expires", str)),
            nonce=nonce,
            audience=take_key_ids(data, "audience", AUDIENCE),
        )


def _issuer(value: object) -> Issuer:
    data = take_exact(value, ["key_id", "name"])
    return Issuer(parse_key_id(take(data, "key_id", str)), take_text(data, "name"))
