"""`kvport selfcheck`: a model's state, captured, stored, restored and compared."""

import tempfile
from pathlib import Path

import attrs
import rich_click as click
from click.exceptions import Exit

from kvport.api.cli.options import POLICY
from kvport.api.cli.output import json_option, print_facts, print_json
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine import selfcheck as engine
from kvport.snapshot.engine.models import locate
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.runner import Tuning


@click.command()
@click.option(
    "--model",
    metavar="DIR|ID",
    required=True,
    help="The model's directory, or its Hugging Face id.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    required=True,
    help="Length of the random prompt; more than the chunk under `exact`.",
)
@click.option(
    "--policy",
    type=POLICY,
    default=Policy.NEAREST.value,
    show_default=True,
    help="Which stored state may be restored.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=Tuning().chunk,
    show_default=True,
    help="Tokens that prefill evaluates at once, and between points.",
)
@json_option
def selfcheck(
    model: str, *, tokens: int, policy: str, chunk: int, as_json: bool
) -> None:
    """Prove that a model restores exactly.

    Computes a prompt, stores its state, closes everything, restores the state and goes
    on for 32 tokens. The differences are of log-probabilities over the whole
    vocabulary: to the origin's own continuation (`hot`), which must be 0, and to an
    empty cache (`cold`), which must be 0 under `exact`. Ends with 1 if they are not, or
    if less was restored than the policy must give.
    """
    if chunk % BLOCK_SIZE:
        raise click.BadParameter(
            f"must be a multiple of {BLOCK_SIZE}, the block size", param_hint="--chunk"
        )
    name, directory = locate(model)
    with tempfile.TemporaryDirectory(prefix="kvport-selfcheck-") as work:
        report = engine.selfcheck(
            name,
            directory,
            work=Path(work),
            tokens=tokens,
            policy=Policy(policy),
            chunk=chunk,
        )
    if as_json:
        print_json(attrs.asdict(report) | {"passed": report.passed})
    else:
        print_facts(
            [
                ("model", report.model),
                ("policy", report.policy.value),
                ("tokens", f"{report.tokens}"),
                (
                    "restored_tokens",
                    f"{report.restored_tokens} (expected {report.expected_tokens})",
                ),
                ("max_diff_to_hot", f"{report.max_diff_to_hot}"),
                ("max_diff_to_cold", f"{report.max_diff_to_cold}"),
                ("result", "passed" if report.passed else "FAILED"),
            ]
        )
    if not report.passed:
        raise Exit(1)
