"""State identity, numerics and provenance: what equality of state means.

* `StateIdentity` determines the meaning of the bytes. It is hashed into every key, so
  states of different identity never meet. `mismatched_fields` names differences.
* `Numerics` determines the last bits only (version of mlx, device, BLAS, chunk). It
  is recorded and signed with every stored blob, not hashed into keys.
* `Provenance` is one true statement about stored bytes: their lineage, numerics, and
  the keys of all issuers that any part of the state came from.

Never part of any of these: context length, batch size, the model's name or path.
"""

from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NewType

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import derive, parse_digest
from kvport.manifest.domains import Domain
from kvport.manifest.errors import FormatError
from kvport.manifest.fields import take, take_exact
from kvport.manifest.layout import StateLayout

STATE_FORMAT: Final = 1
"""Version of the canonical form of states; a change makes all older state foreign."""

KeyId = NewType("KeyId", str)
"""`ed25519:` and 64 hex digits: derived from a public key (keys.py)."""

FINGERPRINT_DIGITS: Final = 32


def fingerprint(key_id: str) -> str:
    """128 bits of a key id in groups of four digits, for two people to compare."""
    digits = key_id.partition(":")[2][:FINGERPRINT_DIGITS]
    return " ".join(digits[at : at + 4] for at in range(0, FINGERPRINT_DIGITS, 4))


@attrs.frozen(slots=False)
class StateIdentity:
    """What determines the meaning of a state's bytes.

    Attributes:
        model_files: digest over names, sizes and contents of the files that mlx-lm
            loads for the weights and the geometry.
        adapters: digests of adapter files, in order of application.
        quant: the model's weight quantisation as its config states it, `{}` if none;
            floats in it are kept as strings.
        kv: representation of keys and values, `model` for the model's own dtype.
        layout: cache objects with dtype and shape of every leaf.
        mlx_lm: version of mlx-lm, exact.
        state_format: `STATE_FORMAT`.
    """

    model_files: str
    adapters: tuple[str, ...]
    quant: dict[str, Any] = attrs.field(hash=False)
    kv: str
    layout: StateLayout
    mlx_lm: str
    state_format: int = STATE_FORMAT

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: KDF(state-identity, canonical JSON)."""
        return derive(Domain.STATE_IDENTITY, canonical_dumps(self.to_json()))

    def mismatched_fields(self, other: "StateIdentity") -> tuple[str, ...]:
        """Names of the fields that differ, in a fixed order; empty if equal."""
        mine, theirs = self.to_json(), other.to_json()
        return tuple(name for name in mine if mine[name] != theirs[name])

    def to_json(self) -> dict[str, Any]:
        """The JSON form that manifests carry."""
        return {
            "model_files": self.model_files,
            "adapters": list(self.adapters),
            "quant": self.quant,
            "kv": self.kv,
            "layout": self.layout.to_json(),
            "mlx_lm": self.mlx_lm,
            "state_format": self.state_format,
        }

    @classmethod
    def from_json(cls, value: object) -> "StateIdentity":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a state identity.
        """
        data = take_exact(value, [field.name for field in attrs.fields(cls)])
        adapters = take(data, "adapters", list)
        for text in (take(data, "model_files", str), *adapters):
            if not isinstance(text, str):
                raise FormatError("an adapter's digest is not a string")
            parse_digest(text)
        return cls(
            model_files=data["model_files"],
            adapters=tuple(adapters),
            quant=take(data, "quant", dict),
            kv=take(data, "kv", str),
            layout=StateLayout.from_json(data["layout"]),
            mlx_lm=take(data, "mlx_lm", str),
            state_format=take(data, "state_format", int),
        )


@attrs.frozen
class Numerics:
    """What determines the last bits of a computation.

    Attributes:
        mlx: version of mlx.
        device: `cpu` or `gpu`.
        gpu_family: the GPU's architecture name, empty on the CPU.
        blas: name of the BLAS library that a CPU computation uses, empty on the GPU.
        blas_threads: its threads; 0 where it does not apply or is unknown.
        chunk: tokens that prefill evaluates at once.
        compile: whether mlx compiles kernels.
    """

    mlx: str
    device: str
    gpu_family: str
    blas: str
    blas_threads: int
    chunk: int
    compile: bool

    @property
    def digest(self) -> bytes:
        """32 bytes, for comparison and as a key of tables."""
        return derive(Domain.NUMERICS, canonical_dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """The JSON form that manifests carry."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Numerics":
        """Decode, refusing unknown and missing fields.

        Raises:
            FormatError: the value is not a numerics record.
        """
        fields = attrs.fields(cls)
        data = take_exact(value, [field.name for field in fields])
        for field in fields:
            take(data, field.name, field.type or object)
        if data["chunk"] < 1 or data["blas_threads"] < 0:
            raise FormatError("a numerics record has a number out of range")
        return cls(**data)


class Lineage(StrEnum):
    """How a state came about."""

    COLD = "cold"
    """The whole prefix prefilled alone, stopped only at chunk multiples."""
    DERIVED = "derived"
    """All else: decode, batch, draft, other stops."""


@attrs.frozen
class Provenance:
    """One statement about stored bytes; several can be true of the same bytes."""

    lineage: Lineage
    numerics: Numerics
    origins: frozenset[KeyId]


class PointKind(StrEnum):
    """Why a position is kept on purpose."""

    STRIDE = "stride"
    FORK = "fork"
    PROMPT = "prompt"
    REPLY = "reply"
