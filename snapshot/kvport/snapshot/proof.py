"""Proof of an artifact: parts of it computed again here, and versions accepted for it.

A signature says who exported. Whether the values are those that the model computes, and
whether another version's state means the same here, can only be computed: this is done
for a sample, in a cache of its own. What passes may be accepted as an equivalence pair.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.equivalence import (
    NONE,
    VERSION_FIELDS,
    Equivalence,
    Versions,
)
from kvport.manifest.identity import StateIdentity
from kvport.manifest.tokens import decode_tokens
from kvport.manifest.verified import VerifiedManifest
from kvport.snapshot.engine.comparison import ROUNDING
from kvport.snapshot.engine.recompute import Part, Recomputer, sample
from kvport.snapshot.errors import ProofError, UnsupportedModelError
from kvport.snapshot.home_lock import changing
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.transfer.archive import open_file
from kvport.snapshot.transfer.issue import restorable
from kvport.snapshot.workbench import Workbench

SAMPLES: Final = 8


@attrs.frozen
class Proof:
    """What came of it.

    Attributes:
        artifact_id: of the artifact.
        model: name of the model here.
        tokens: length of its prefix.
        parts: that were computed again.
        pair: that would have its versions accepted; None if they are those here.
    """

    artifact_id: ArtifactId
    model: str
    tokens: int
    parts: tuple[Part, ...]
    pair: Equivalence | None

    @property
    def max_difference(self) -> float:
        """The largest of the parts."""
        return max(part.difference for part in self.parts)

    @property
    def passed(self) -> bool:
        """Whether all parts are those computed here, up to rounding."""
        return self.max_difference <= ROUNDING

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "artifact_id": self.artifact_id,
            "model": self.model,
            "tokens": self.tokens,
            "parts": [attrs.asdict(part) for part in self.parts],
            "max_difference": self.max_difference,
            "passed": self.passed,
            "versions": None if self.pair is None else self.pair.to_json(),
        }


def prove(
    file: BinaryIO,
    source: str,
    *,
    home: Path,
    work: Path,
    kv_form: KvForm | None = None,
    samples: int = SAMPLES,
) -> Proof:
    """Compute parts of an artifact again.

    Args:
        file: the artifact; it is read twice.
        source: the model's directory or Hugging Face id.
        home: whose keys are trusted.
        work: an empty directory, which needs as much room as the state.
        kv_form: of keys and values; None for the model's own.
        samples: parts at most.

    Raises:
        KeyFileError: the home has no key.
        ModelLoadError: there is no such model.
        UnsupportedModelError: its state is not carried, or depends on how its caches
            were filled.
        KvportError: whatever an import refuses, but for other versions.
    """
    keyring = Keyring(home)
    verified, encoded = open_file(
        file,
        trust=keyring.load_trust(),
        now=datetime.now(UTC),
        own_key=keyring.signing_key().public.key_id,
        recipient=keyring.recipient_key(),
    )
    manifest, tokens = verified.manifest, decode_tokens(encoded)
    file.seek(0)
    with Workbench.open(
        source,
        home=home,
        work=work,
        kv_form=kv_form,
        block_size=manifest.block_size,
    ) as bench:
        if bench.namespace.layout.head:
            raise UnsupportedModelError("limited caches depend on how they were filled")
        pair = _pair(verified, bench.namespace.identity)
        trial = NONE if pair is None else NONE.with_pair(pair)
        artifact, path = bench.admit(file, trial)
        if artifact != verified.artifact_id:
            raise ProofError("the file was changed while it was read")
        ends = [
            node.end
            for node, here in zip(
                path, restorable(bench.namespace.layout, path), strict=True
            )
            if here
        ]
        recomputer = Recomputer(
            cache=bench.cache,
            namespace=bench.namespace,
            path=path,
            tokens=tokens,
            module=bench.model.module,
            kv_form=kv_form,
        )
        parts = map(recomputer.compute, sample(ends, samples))
        return Proof(artifact, bench.model.name, len(tokens), tuple(parts), pair)


def accept(home: Path, proof: Proof) -> bool:
    """Have the artifact's versions accepted from now on; False if they are ours.

    Raises:
        ProofError: the proof failed.
        KeyFileError: the present list is not fit for use.
    """
    if not proof.passed:
        raise ProofError("parts of the artifact are not what is computed here")
    if proof.pair is None:
        return False
    with changing(home):
        Keyring(home).accept(proof.pair)
    return True


def _pair(verified: VerifiedManifest, ours: StateIdentity) -> Equivalence | None:
    """The pair that would cover its versions, if nothing else differs."""
    theirs = verified.manifest.identity
    fields = theirs.mismatched_fields(ours)
    if not fields or not VERSION_FIELDS.issuperset(fields):
        return None
    return Equivalence(
        model_files=ours.model_files,
        theirs=Versions.of(theirs),
        ours=Versions.of(ours),
        artifact=verified.artifact_id,
        accepted=datetime.now(UTC).replace(microsecond=0),
    )
