"""The manifest: everything that an artifact's signature covers.

Decoding checks form, types and counts. What must add up is checked in arithmetic.py.
"""

from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, format_digest, parse_digest
from kvport.manifest.errors import FormatError, UnsupportedVersionError
from kvport.manifest.fields import take, take_count, take_exact, take_items, take_text
from kvport.manifest.identity import KeyId, StateIdentity
from kvport.manifest.limits import BLOCK_TOKENS, POINTS, SEGMENTS, SEQUENCE
from kvport.manifest.parts import Point, Prefix, Segment, Tables
from kvport.manifest.terms import TERMS_FIELDS, Terms
from kvport.manifest.trust import check_label

FORMAT: Final = "kvport"
FORMAT_VERSION: Final = 1
ARTIFACT_KIND: Final = "prefix"


@attrs.frozen
class Info:
    """For people: printable, never compared, may be empty."""

    host: str = ""
    exporter: str = ""
    chat_template: str = ""
    hardware: str = ""


@attrs.frozen
class Session:
    """Which conversation the prefix belongs to, and how far it has come.

    Attributes:
        id: label that the issuer gave the conversation, empty for none.
        sequence: rises with each artifact of the conversation; 0 for none.
    """

    id: str = ""
    sequence: int = 0

    def __attrs_post_init__(self) -> None:
        if self.id:
            check_label(self.id)
        if bool(self.id) != (self.sequence > 0):
            raise FormatError("a session has a label and a sequence, or neither")

    @classmethod
    def from_json(cls, value: object) -> "Session":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a session.
            LimitExceededError: the sequence is too large.
        """
        data = take_exact(value, ["id", "sequence"])
        return cls(take(data, "id", str), take_count(data, "sequence", SEQUENCE))


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
        terms: who issued it, for whom, and until when.
        session: the conversation that it is of.
        info: for people.
    """

    block_size: int
    identity: StateIdentity
    tokenizer: BlobDigest
    prefix: Prefix
    segments: tuple[Segment, ...]
    points: tuple[Point, ...]
    terms: Terms
    session: Session = Session()
    info: Info = Info()

    def encode(self) -> bytes:
        """The payload: canonical JSON.

        Raises:
            FormatError: a part is outside of what canonical JSON can say.
        """
        return canonical_dumps(self.to_json())

    @property
    def origins(self) -> frozenset[KeyId]:
        """Keys that any part of the state came from."""
        parts: tuple[Segment | Point, ...] = (*self.segments, *self.points)
        return frozenset[KeyId]().union(*(part.provenance.origins for part in parts))

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        tables = Tables.of((*self.segments, *self.points))
        return {
            **self.terms.to_json(),
            "artifact_kind": ARTIFACT_KIND,
            "block_size": self.block_size,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "identity": self.identity.to_json(),
            "info": attrs.asdict(self.info),
            "numerics": [row.to_json() for row in tables.numerics],
            "origins": list(tables.origins),
            "points": [point.to_json(tables) for point in self.points],
            "prefix": self.prefix.to_json(),
            "segments": [segment.to_json(tables) for segment in self.segments],
            "session": attrs.asdict(self.session),
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
        check_version(value, ARTIFACT_KIND)
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
            terms=Terms.from_json(data),
            session=Session.from_json(data["session"]),
            info=_info(data["info"]),
        )
        if manifest.block_size == 0:
            raise FormatError("the block size is 0")
        if tables != Tables.of((*manifest.segments, *manifest.points)):
            raise FormatError("a table has rows that are unused or out of order")
        return manifest


_FIELDS: Final = (
    *TERMS_FIELDS, "artifact_kind", "block_size", "format", "format_version",
    "identity", "info", "numerics", "origins", "points", "prefix", "segments",
    "session", "tokenizer",
)  # fmt: skip


def check_version(value: object, kind: str) -> None:
    """Look at format, version and kind of a payload, before its other fields.

    Raises:
        UnsupportedVersionError: another version or kind of artifact.
        FormatError: not a payload of ours.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError("not a kvport manifest")
    if take(value, "format_version", int) != FORMAT_VERSION:
        raise UnsupportedVersionError("a manifest of another format version")
    if take(value, "artifact_kind", str) != kind:
        raise UnsupportedVersionError("an artifact of another kind")


def _info(value: object) -> Info:
    names = [field.name for field in attrs.fields(Info)]
    data = take_exact(value, names)
    return Info(**{name: take_text(data, name) for name in names})
