"""`kvport selfcheck`: a model's state, captured, stored, restored and compared."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import rich_click as click
from click.exceptions import Exit
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvport.api.cli.logs import log_to_stderr
from kvport.api.cli.options import KV_BITS, KV_GROUP_SIZE, POLICY
from kvport.api.cli.output import (
    describe_numerics,
    json_option,
    print_facts,
    print_json,
    stderr,
)
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine import selfcheck as engine
from kvport.snapshot.engine.local_identity import numerics
from kvport.snapshot.engine.models import locate
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.runner import Tuning
from kvport.snapshot.state.probe import Quantisation


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
    help="Length of the random prompt, more than the chunk under `exact`; four chunks"
    " and one token unless given.",
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
@KV_BITS
@KV_GROUP_SIZE
@json_option
def selfcheck(
    model: str,
    *,
    tokens: int | None,
    policy: str,
    chunk: int,
    kv_bits: str | None,
    kv_group_size: str,
    as_json: bool,
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
    log_to_stderr(logging.WARNING)
    began = time.monotonic()
    name, directory = locate(model)
    with (
        tempfile.TemporaryDirectory(prefix="kvport-selfcheck-") as work,
        _running(f"checking {name}"),
    ):
        report = engine.selfcheck(
            name,
            directory,
            work=Path(work),
            tokens=4 * chunk + 1 if tokens is None else tokens,
            policy=Policy(policy),
            chunk=chunk,
            quantisation=Quantisation(int(kv_bits), int(kv_group_size))
            if kv_bits
            else None,
        )
    seconds = round(time.monotonic() - began, 3)
    here = numerics(chunk)
    if as_json:
        found = attrs.asdict(report) | {"numerics": here.to_json()}
        print_json(found | {"duration_s": seconds, "passed": report.passed})
    else:
        restored = f"{report.restored_tokens} of {report.tokens} tokens"
        print_facts(
            [
                ("model", report.model),
                ("on", describe_numerics(here)),
                ("policy", report.policy.value),
                ("restored", f"{restored}, expected {report.expected_tokens}"),
                ("difference to hot", _difference(report.max_diff_to_hot)),
                ("difference to cold", _difference(report.max_diff_to_cold)),
                ("took", f"{seconds:.1f} s"),
                ("result", "passed" if report.passed else "FAILED"),
            ]
        )
    if not report.passed:
        raise Exit(1)


@contextlib.contextmanager
def _running(what: str) -> Iterator[None]:
    """A line on standard error while it runs, if that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _difference(value: float) -> str:
    return "none" if value == 0 else f"{value:.1e}"
