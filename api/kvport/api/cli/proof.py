"""`kvport selfcheck --artifact`: parts of a file, computed again here."""

import tempfile
from pathlib import Path

from kvport.api.cli.errors import NoHomeError, naming
from kvport.api.cli.output import print_facts, print_json, print_table, say
from kvport.snapshot.proof import Proof, accept, prove
from kvport.snapshot.state.kv_form import KvForm


def check_artifact(
    file: Path,
    model: str,
    *,
    home: Path,
    kv_form: KvForm | None,
    accepting: bool,
    as_json: bool,
) -> bool:
    """Compute parts of an artifact again; whether it passed.

    Args:
        file: the artifact.
        model: directory or Hugging Face id of the model that it is of.
        home: whose keys are trusted, and where a pair is accepted.
        kv_form: of keys and values.
        accepting: whether its versions are accepted if it passes.
        as_json: for programs.
    """
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    with (
        tempfile.TemporaryDirectory(prefix="kvport-selfcheck-") as work,
        naming(file),
        file.open("rb") as source,
    ):
        proof = prove(source, model, home=home, work=Path(work), kv_form=kv_form)
    accepted = accepting and proof.passed and accept(home, proof)
    if as_json:
        print_json(proof.to_json() | {"accepted": accepted})
    else:
        _tell(proof, accepted=accepted, accepting=accepting)
    return proof.passed


def _tell(proof: Proof, *, accepted: bool, accepting: bool) -> None:
    print_facts(
        [
            ("artifact", proof.artifact_id),
            ("model", proof.model),
            ("tokens", str(proof.tokens)),
            ("result", "passed" if proof.passed else "FAILED"),
        ]
    )
    print_table(
        (">from", ">to", ">difference"),
        (
            (str(part.start), str(part.end), f"{part.difference:.1e}")
            for part in proof.parts
        ),
    )
    if proof.pair is None:
        if accepting:
            say("Its versions are those here: there is nothing to accept.")
        return
    theirs, ours = proof.pair.theirs, proof.pair.ours
    pair = (
        f"state of mlx-lm {theirs.mlx_lm}, state format {theirs.state_format},"
        f" as if of mlx-lm {ours.mlx_lm}, state format {ours.state_format}"
    )
    if accepted:
        say(f"From now on this home takes {pair}, for this model.")
    elif proof.passed:
        say(f"With --accept this home takes {pair}, for this model.")
