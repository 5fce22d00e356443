"""The manifest: everything that an artifact's signature covers.

Decoding checks form, types and counts. What must add up is checked in arithmetic.py.
"""

import re
from datetime import datetime
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, format_digest, parse_digest
from kvport.manifest.errors import FormatError, UnsupportedVersionError
from kvport.manifest.fields import take, take_count, take_exact, take_items, take_text
from kvport.manifest.identity import KeyId, StateIdentity
from kvport.manifest.keys import parse_key_id
from kvport.manifest.limits import AUDIENCE, BLOCK_TOKENS, POINTS, SEGMENTS
from kvport.manifest.parts import Point, Prefix, Segment, Tables, take_key_ids
from kvport.manifest.timestamps import format_time, parse_time
from kvport.manifest.trust import check_scope

FORMAT: Final = "kvport"
FORMAT_VERSION: Final = 1
ARTIFACT_KIND: Final = "prefix"
_NONCE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@attrs.frozen
class Issuer:
    """Who made the artifact: a key that signed it, and a name for people."""

    key_id: KeyId
    name: str


@attrs.frozen
class Info:
    """For people: printable, never compared, may be empty."""

    host: str = ""
    exporter: str = ""
    chat_template: str = ""
    hardware: str = ""


@attrs.frozen(kw_only=True)
class Manifest:
    """One exported prefix.

    Attributes:
        block_size: tokens in a block.
        identity: what determines the meaning of the bytes.
        tokenizer: digest of the tokenizer's files.
        prefix: the token entry.
        segments: from token 0, ascending.
        points: ascending.
        scope: label that the exporter gave.
        issuer: who made it.
        created: aware, whole seconds.
        expires: aware, whole seconds; admitted state does not expire with it.
        nonce: 32 hex digits.
        audience: key ids of the nodes it is for, sorted; empty for anyone.
        info: for people.
    """

    block_size: int
    identity: StateIdentity
    tokenizer: BlobDigest
    prefix: Prefix
    segments: tuple[Segment, ...]
    points: tuple[Point, ...]
    scope: str
    issuer: Issuer
    created: datetime
    expires: datetime
    nonce: str
    audience: tuple[KeyId, ...] = ()
    info: Info = Info()

    def encode(self) -> bytes:
        """The payload: canonical JSON.

        Raises:
            FormatError: a part is outside of what canonical JSON can say.
        """
        return canonical_dumps(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        tables = Tables.of((*self.segments, *self.points))
        return {
            "artifact_kind": ARTIFACT_KIND,
            "audience": list(self.audience),
            "block_size": self.block_size,
            "created": format_time(self.created),
            "expires": format_time(self.expires),
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "identity": self.identity.to_json(),
            "info": attrs.asdict(self.info),
            "issuer": attrs.asdict(self.issuer),
            "nonce": self.nonce,
            "numerics": [row.to_json() for row in tables.numerics],
            "origins": list(tables.origins),
            "points": [point.to_json(tables) for point in self.points],
            "prefix": self.prefix.to_json(),
            "scope": self.scope,
            "segments": [segment.to_json(tables) for segment in self.segments],
            "tokenizer": format_digest(self.tokenizer),
        }

    @classmethod
    def from_json(cls, value: object) -> "Manifest":
        """Decode, refusing unknown and missing fields.

        Raises:
            UnsupportedVersionError: another version or kind of artifact.
            FormatError: the value is not a manifest.
            LimitExceededError: a count or size is above the format's limits.
        """
        _check_version(value)
        data = take_exact(value, _FIELDS)
        tables = Tables.from_json(data)
        segments = take_items(data, "segments", SEGMENTS)
        points = take_items(data, "points", POINTS)
        manifest = cls(
            block_size=take_count(data, "block_size", BLOCK_TOKENS),
            identity=StateIdentity.from_json(data["identity"]),
            tokenizer=parse_digest(take(data, "tokenizer", str)),
            prefix=Prefix.from_json(data["prefix"]),
            segments=tuple(Segment.from_json(item, tables) for item in segments),
            points=tuple(Point.from_json(item, tables) for item in points),
            scope=check_scope(take(data, "scope", str)),
            issuer=_issuer(data["issuer"]),
            created=parse_time(take(data, "created", str)),
            expires=parse_time(take(data, "expires", str)),
            nonce=take(data, "nonce", str),
            audience=take_key_ids(data, "audience", AUDIENCE),
            info=_info(data["info"]),
        )
        if manifest.block_size == 0 or not _NONCE.fullmatch(manifest.nonce):
            raise FormatError("the block size or the nonce is out of form")
        if tables != Tables.of((*manifest.segments, *manifest.points)):
            raise FormatError("a table has rows that are unused or out of order")
        return manifest


_FIELDS: Final = (
    "artifact_kind", "audience", "block_size", "created", "expires", "format",
    "format_version", "identity", "info", "issuer", "nonce", "numerics", "origins",
    "points", "prefix", "scope", "segments", "tokenizer",
)  # fmt: skip


def _check_version(value: object) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError("not a kvport manifest")
    if take(value, "format_version", int) != FORMAT_VERSION:
        raise UnsupportedVersionError("a manifest of another format version")
    if take(value, "artifact_kind", str) != ARTIFACT_KIND:
        raise UnsupportedVersionError("an artifact of another kind")


def _issuer(value: object) -> Issuer:
    data = take_exact(value, ["key_id", "name"])
    return Issuer(parse_key_id(take(data, "key_id", str)), take_text(data, "name"))


def _info(value: object) -> Info:
    names = [field.name for field in attrs.fields(Info)]
    data = take_exact(value, names)
    return Info(**{name: take_text(data, name) for name in names})
