"""The parts of a manifest: token entry, segments, points, and what each claims.

In the JSON, numerics and origins stand in two tables, and segments and points refer to
their rows by index. Here each part holds its `Provenance` itself: `tables` gives the
one permitted pair of tables (numerics in order of first use, origins sorted, no row
unused), and `PartReader` resolves the references.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

import attrs

from kvport.manifest.codec import Codec
from kvport.manifest.digests import (
    BlobDigest,
    Key,
    format_digest,
    parse_digest,
    parse_hex32,
)
from kvport.manifest.errors import FormatError
from kvport.manifest.fields import (
    take,
    take_count,
    take_exact,
    take_items,
    take_member,
)
from kvport.manifest.identity import (
    KeyId,
    Lineage,
    Numerics,
    PointKind,
    Provenance,
)
from kvport.manifest.keys import parse_key_id
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import BLOB_BYTES, TABLE_ROWS, TOKENS
from kvport.manifest.tokens import TOKEN_SIZE


@attrs.frozen
class Blob:
    """One blob, and how it stands in the container.

    Attributes:
        blob_class: what it holds.
        digest: of its plain bytes.
        size: of its plain bytes.
        codec: how it is encoded.
        encoded_size: its bytes in the container.
    """

    blob_class: BlobClass
    digest: BlobDigest
    size: int
    codec: Codec = Codec.NONE
    encoded_size: int = attrs.field(
        default=attrs.Factory(lambda self: self.size, takes_self=True)
    )

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "class": self.blob_class.value,
            "codec": self.codec.value,
            "digest": format_digest(self.digest),
            "encoded_size": self.encoded_size,
            "size": self.size,
        }

    @classmethod
    def from_json(cls, value: object) -> "Blob":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a blob.
            LimitExceededError: the blob is too large.
        """
        data = take_exact(value, ["class", "codec", "digest", "encoded_size", "size"])
        return cls(
            take_member(data, "class", BlobClass),
            parse_digest(take(data, "digest", str)),
            take_count(data, "size", BLOB_BYTES),
            take_member(data, "codec", Codec),
            take_count(data, "encoded_size", BLOB_BYTES),
        )


@attrs.frozen
class Prefix:
    """The token entry: number of ids, key(tokens), digest and size of the entry."""

    tokens: int
    key: Key
    digest: BlobDigest
    size: int

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "digest": format_digest(self.digest),
            "key": self.key.hex(),
            "size": self.size,
            "tokens": self.tokens,
        }

    @classmethod
    def from_json(cls, value: object) -> "Prefix":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a prefix.
            LimitExceededError: the prefix is too long.
        """
        data = take_exact(value, ["digest", "key", "size", "tokens"])
        return cls(
            tokens=take_count(data, "tokens", TOKENS),
            key=Key(parse_hex32(take(data, "key", str))),
            digest=parse_digest(take(data, "digest", str)),
            size=take_count(data, "size", TOKENS * TOKEN_SIZE),
        )


@attrs.frozen(slots=False)
class Tables:
    """The numerics and origins that parts of one manifest refer to."""

    numerics: tuple[Numerics, ...]
    origins: tuple[KeyId, ...]

    @classmethod
    def of(cls, parts: "Iterable[Segment | Point]") -> "Tables":
        """The one pair of tables for these parts, in this order."""
        said = dict.fromkeys(part.provenance for part in parts)
        return cls(
            tuple(dict.fromkeys(provenance.numerics for provenance in said)),
            tuple(sorted({key for provenance in said for key in provenance.origins})),
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tables":
        """Decode the fields `numerics` and `origins` of a manifest.

        Raises:
            FormatError: they are not tables.
            LimitExceededError: too many rows.
        """
        rows = take_items(data, "numerics", TABLE_ROWS)
        return cls(
            tuple(map(Numerics.from_json, rows)),
            take_key_ids(data, "origins", TABLE_ROWS),
        )

    def refer(self, provenance: Provenance) -> dict[str, Any]:
        """The fields by which a part states its provenance."""
        numerics, origins = self._index
        return {
            "lineage": provenance.lineage.value,
            "numerics": numerics[provenance.numerics],
            "origins": sorted(origins[key] for key in provenance.origins),
        }

    def resolve(self, data: dict[str, Any]) -> Provenance:
        """Inverse of `refer`.

        Raises:
            FormatError: a field is out of form, or a row does not exist.
        """
        numerics = take(data, "numerics", int)
        origins = take_items(data, "origins", TABLE_ROWS)
        if not all(type(index) is int for index in origins):
            raise FormatError("an origin is not an index")
        if not origins or origins != sorted(set(origins)):
            raise FormatError("origins of a part are not sorted, or there are none")
        if not 0 <= numerics < len(self.numerics):
            raise FormatError("a part refers to numerics that are not in the table")
        if not 0 <= origins[0] <= origins[-1] < len(self.origins):
            raise FormatError("a part refers to an origin that is not in the table")
        provenance = Provenance(
            take_member(data, "lineage", Lineage),
            self.numerics[numerics],
            frozenset(self.origins[index] for index in origins),
        )
        # One object for all parts that say the same: there may be thousands.
        return self._resolved.setdefault(provenance, provenance)

    @cached_property
    def _index(self) -> tuple[dict[Numerics, int], dict[KeyId, int]]:
        return (
            {row: index for index, row in enumerate(self.numerics)},
            {key: index for index, key in enumerate(self.origins)},
        )

    @cached_property
    def _resolved(self) -> dict[Provenance, Provenance]:
        return {}


@attrs.frozen
class Segment:
    """Stored rows [start, end) within one block; `key` is key(end)."""

    start: int
    end: int
    key: Key
    provenance: Provenance
    blobs: tuple[Blob, ...]

    def to_json(self, tables: Tables) -> dict[str, Any]:
        """The JSON form, which refers to `tables`."""
        return {
            "blobs": [blob.to_json() for blob in self.blobs],
            "end": self.end,
            "key": self.key.hex(),
            "start": self.start,
            **tables.refer(self.provenance),
        }

    @classmethod
    def from_json(cls, value: object, tables: Tables) -> "Segment":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a segment.
            LimitExceededError: a number is above the format's limits.
        """
        data = take_exact(value, ["end", "key", "start", *_COMMON])
        return cls(
            start=take_count(data, "start", TOKENS),
            end=take_count(data, "end", TOKENS),
            key=Key(parse_hex32(take(data, "key", str))),
            provenance=tables.resolve(data),
            blobs=_blobs(data),
        )


@attrs.frozen
class Point:
    """A position kept on purpose: the end of a segment.

    Attributes:
        position: tokens before it.
        kinds: sorted by name, at least one.
        provenance: that of the segment which ends here.
        blobs: one of class `state`, or none if the layout has no whole layers.
    """

    position: int
    kinds: tuple[PointKind, ...]
    provenance: Provenance
    blobs: tuple[Blob, ...]

    def to_json(self, tables: Tables) -> dict[str, Any]:
        """The JSON form, which refers to `tables`."""
        return {
            "blobs": [blob.to_json() for blob in self.blobs],
            "kinds": [kind.value for kind in self.kinds],
            "position": self.position,
            **tables.refer(self.provenance),
        }

    @classmethod
    def from_json(cls, value: object, tables: Tables) -> "Point":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a point.
            LimitExceededError: a number is above the format's limits.
        """
        data = take_exact(value, ["kinds", "position", *_COMMON])
        names = take_items(data, "kinds", len(PointKind))
        if not all(type(name) is str and name in _KINDS for name in names):
            raise FormatError("a point is of an unknown kind")
        if not names or names != sorted(set(names)):
            raise FormatError("a point's kinds are not sorted, or there are none")
        return cls(
            position=take_count(data, "position", TOKENS),
            kinds=tuple(map(PointKind, names)),
            provenance=tables.resolve(data),
            blobs=_blobs(data),
        )


_COMMON: Final = ("blobs", "lineage", "numerics", "origins")
_KINDS: Final = frozenset(PointKind)


def take_key_ids(data: dict[str, Any], name: str, limit: int) -> tuple[KeyId, ...]:
    """A field that is a sorted list of at most `limit` different key ids.

    Raises:
        FormatError: the field is missing or anything else.
        LimitExceededError: more of them.
    """
    items = take_items(data, name, limit)
    if not all(type(item) is str for item in items) or items != sorted(set(items)):
        raise FormatError(f"{name!r} is not a sorted list of key ids")
    return tuple(map(parse_key_id, items))


def _blobs(data: dict[str, Any]) -> tuple[Blob, ...]:
    return tuple(map(Blob.from_json, take_items(data, "blobs", len(BlobClass))))
