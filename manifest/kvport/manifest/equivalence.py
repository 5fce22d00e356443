"""Equivalence pairs: other versions whose state was found to mean the same here.

An operator makes a pair by computing a part of an artifact again (`kvport selfcheck
--artifact`). It is of one set of model files, and widens nothing but the versions of
mlx-lm and of the state's form: all else of a state identity must be equal.
"""

from datetime import datetime
from typing import Any, Final

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import ArtifactId, format_digest, parse_digest
from kvport.manifest.errors import FormatError, LimitExceededError
from kvport.manifest.fields import take, take_count, take_exact, take_items, take_text
from kvport.manifest.identity import StateIdentity
from kvport.manifest.limits import EQUIVALENCE_BYTES, EQUIVALENCES
from kvport.manifest.timestamps import format_time, parse_time

VERSION_FIELDS: Final = frozenset({"mlx_lm", "state_format"})
"""Fields of a state identity that a pair may widen."""

_HEAD: Final[dict[str, Any]] = {
    "format": "kvport-equivalences",
    "format_version": 1,
}
_STATE_FORMATS: Final = 1 << 16


@attrs.frozen
class Versions:
    """What computed a state: version of mlx-lm, version of the state's form."""

    mlx_lm: str
    state_format: int

    @classmethod
    def of(cls, identity: StateIdentity) -> "Versions":
        """Those of a state identity."""
        return cls(identity.mlx_lm, identity.state_format)

    @classmethod
    def from_json(cls, value: object) -> "Versions":
        """Decode.

        Raises:
            FormatError: the value is not a pair of versions.
            LimitExceededError: the form's version is too large.
        """
        data = take_exact(value, ["mlx_lm", "state_format"])
        return cls(
            take_text(data, "mlx_lm"), take_count(data, "state_format", _STATE_FORMATS)
        )


@attrs.frozen(kw_only=True)
class Equivalence:
    """One pair.

    Attributes:
        model_files: digest of the model's files, `blake3:<64 hex>`.
        theirs: that are accepted,
        ours: where these are in use.
        artifact: of which a part was computed again.
        accepted: when, aware.
    """

    model_files: str
    theirs: Versions
    ours: Versions
    artifact: ArtifactId
    accepted: datetime

    @property
    def pair(self) -> tuple[str, Versions, Versions]:
        """What it is about; the rest says where it comes from."""
        return self.model_files, self.theirs, self.ours

    def covers(self, theirs: StateIdentity, ours: StateIdentity) -> bool:
        """Whether state of another identity may be taken for ours."""
        return (
            VERSION_FIELDS.issuperset(theirs.mismatched_fields(ours))
            and self.model_files == theirs.model_files
            and self.theirs == Versions.of(theirs)
            and self.ours == Versions.of(ours)
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "accepted": format_time(self.accepted),
            "artifact": self.artifact,
            "model_files": self.model_files,
            "ours": attrs.asdict(self.ours),
            "theirs": attrs.asdict(self.theirs),
        }

    @classmethod
    def from_json(cls, value: object) -> "Equivalence":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a pair.
            LimitExceededError: a number is too large.
        """
        names = [field.name for field in attrs.fields(cls)]
        data = take_exact(value, names)
        digests = [
            format_digest(parse_digest(take(data, name, str)))
            for name in ("model_files", "artifact")
        ]
        return cls(
            model_files=digests[0],
            theirs=Versions.from_json(data["theirs"]),
            ours=Versions.from_json(data["ours"]),
            artifact=ArtifactId(digests[1]),
            accepted=parse_time(take(data, "accepted", str)),
        )


@attrs.frozen
class Equivalences:
    """Pairs, the latest last."""

    pairs: tuple[Equivalence, ...] = ()

    def cover(self, theirs: StateIdentity, ours: StateIdentity) -> bool:
        """Whether one of them covers these."""
        return any(pair.covers(theirs, ours) for pair in self.pairs)

    def with_pair(self, new: Equivalence) -> "Equivalences":
        """With one more, in place of an equal one; the oldest beyond a bound go."""
        others = (pair for pair in self.pairs if pair.pair != new.pair)
        return Equivalences((*others, new)[-EQUIVALENCES:])

    def encode(self) -> bytes:
        """Canonical JSON."""
        return canonical_dumps(
            {**_HEAD, "pairs": [pair.to_json() for pair in self.pairs]}
        )

    @classmethod
    def decode(cls, data: bytes) -> "Equivalences":
        """Inverse of `encode`, refusing everything else.

        Raises:
            FormatError: not a list of pairs in canonical form.
            LimitExceededError: too long.
        """
        if len(data) > EQUIVALENCE_BYTES:
            raise LimitExceededError("the list of equivalences is too long")
        value = take_exact(strict_loads(data), [*_HEAD, "pairs"])
        if any(value[name] != expected for name, expected in _HEAD.items()):
            raise FormatError("not a list of equivalences of this version")
        items = take_items(value, "pairs", EQUIVALENCES)
        return cls(tuple(map(Equivalence.from_json, items)))


NONE: Final = Equivalences()
