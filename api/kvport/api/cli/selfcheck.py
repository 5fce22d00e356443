"""`kvport selfcheck`: a model's state, captured, stored, restored and compared."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import rich_click as click
from click.exceptions import Exit
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvport.api.architectures_page import COLUMNS, figure, row
from kvport.api.cli.logs import log_to_stderr
from kvport.api.cli.options import POLICY, home_option, kv_form_options
from kvport.api.cli.output import (
    describe_numerics,
    json_option,
    print_facts,
    print_json,
    print_table,
    stderr,
)
from kvport.api.cli.proof import check_artifact
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine import selfcheck as engine
from kvport.snapshot.engine.builder import KNOWN_ARCHITECTURES
from kvport.snapshot.engine.local_identity import numerics
from kvport.snapshot.engine.models import locate
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.state.kv_form import KvForm

_BEFORE_A_CHUNK_ENDS = 20
"""By default the prompt ends so many tokens before a chunk does: replies pass it."""


@click.command()
@click.option(
    "--model",
    metavar="DIR|ID",
    help="The model's directory, or its Hugging Face id.",
)
@click.option(
    "--all-architectures",
    is_flag=True,
    help="Check a tiny model of every known architecture; takes minutes.",
)
@click.option(
    "--only",
    type=click.Choice(KNOWN_ARCHITECTURES),
    metavar="NAME",
    multiple=True,
    help="With --all-architectures: only this one; may be repeated.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    help="With --model: length of the random prompt, more than the chunk; a little less"
    " than four chunks unless given.",
)
@click.option(
    "--policy",
    type=POLICY,
    help="Which stored state may be restored; both policies are checked unless given.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    help="With --model: tokens that prefill evaluates at once, and between points;"
    f" {Tuning().chunk} unless given.",
)
@click.option(
    "--artifact",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --model: compute parts of this file's state again, and compare.",
)
@click.option(
    "--accept",
    "accepting",
    is_flag=True,
    help="With --artifact: if it passes, take state of its versions of mlx-lm and of"
    " the state's form for that of the ones here.",
)
@home_option
@kv_form_options
@json_option
def selfcheck(
    model: str | None,
    *,
    all_architectures: bool,
    only: Sequence[str],
    tokens: int | None,
    policy: str | None,
    chunk: int | None,
    artifact: Path | None,
    accepting: bool,
    home: Path,
    kv_form: KvForm | None,
    as_json: bool,
) -> None:
    """Prove that a model restores exactly.

    Computes prompts and replies, stores their state, closes everything, restores at
    each kind of point and goes on for 32 tokens: at a stride point, at the prompt's
    end, at a reply's end, and at the ends of replies that were decoded together. The
    differences are of log-probabilities over the whole vocabulary: to the origin's own
    continuation (`hot`), which must be 0, and to an empty cache (`cold`), which must be
    0 under `exact`. Ends with 1 if they are not, or if anything else was restored than
    the policy must give.

    With --artifact it is a file that is checked, as an import here checks it, and then
    by computing some of its segments again. A signature says who exported the file, not
    that its values are right.
    """
    if (model is None) is not all_architectures:
        raise click.UsageError("give one of --model and --all-architectures")
    policies = tuple(Policy) if policy is None else (Policy(policy),)
    log_to_stderr(logging.WARNING)
    if artifact is not None:
        if model is None or tokens or chunk or policy:
            raise click.UsageError(
                "--artifact goes with --model, not with --tokens, --chunk or --policy"
            )
        passed = check_artifact(
            artifact,
            model,
            home=home,
            kv_form=kv_form,
            accepting=accepting,
            as_json=as_json,
        )
    elif accepting:
        raise click.UsageError("--accept goes with --artifact")
    elif model is None:
        if tokens or chunk or kv_form:
            raise click.UsageError(
                "--tokens, --chunk, --kv-bits and --max-kv-size go with --model"
            )
        passed = _check_architectures(only, policies, as_json=as_json)
    else:
        if only:
            raise click.UsageError("--only goes with --all-architectures")
        chunk = Tuning().chunk if chunk is None else chunk
        if chunk % BLOCK_SIZE:
            raise click.BadParameter(
                f"must be a multiple of {BLOCK_SIZE}, the block size",
                param_hint="--chunk",
            )
        passed = _check_model(
            model,
            tokens=4 * chunk - _BEFORE_A_CHUNK_ENDS if tokens is None else tokens,
            chunk=chunk,
            policies=policies,
            kv_form=kv_form,
            as_json=as_json,
        )
    if not passed:
        raise Exit(1)


def _check_model(
    model: str,
    *,
    tokens: int,
    chunk: int,
    policies: Sequence[Policy],
    kv_form: KvForm | None,
    as_json: bool,
) -> bool:
    began = time.monotonic()
    name, directory = locate(model)
    with (
        tempfile.TemporaryDirectory(prefix="kvport-selfcheck-") as work,
        _running() as tell,
    ):
        tell(f"checking {name}")
        report = engine.selfcheck(
            name,
            directory,
            work=Path(work),
            tokens=tokens,
            chunk=chunk,
            policies=policies,
            kv_form=kv_form,
        )
    seconds = round(time.monotonic() - began, 3)
    here = numerics(chunk)
    if as_json:
        policy = policies[0].value if len(policies) == 1 else "both"
        print_json(
            {"model": name, "policy": policy, "numerics": here.to_json()}
            | report.to_json()
            | {"duration_s": seconds}
        )
        return report.passed
    print_facts(
        [
            ("model", report.model),
            ("on", describe_numerics(here)),
            ("requests", f"alone: {report.alone}" if report.alone else "batched"),
            ("took", f"{seconds:.1f} s"),
            ("result", "passed" if report.passed else "FAILED"),
        ]
    )
    print_table(
        ("case", "policy", ">restored", ">expected", ">to hot", ">to cold"),
        (
            (
                case.case,
                case.policy.value,
                f"{case.restored_tokens}",
                f"{case.expected_tokens}",
                figure(case.max_diff_to_hot),
                "" if case.max_diff_to_cold is None else figure(case.max_diff_to_cold),
            )
            for case in report.cases
        ),
    )
    return report.passed


def _check_architectures(
    only: Sequence[str], policies: Sequence[Policy], *, as_json: bool
) -> bool:
    began = time.monotonic()
    names = [name for name in KNOWN_ARCHITECTURES if not only or name in only]
    reports = []
    with _running() as tell:
        for number, name in enumerate(names, 1):
            tell(f"checking {name}, {number} of {len(names)}")
            reports.append(engine.check_architecture(name, policies=policies))
    seconds = round(time.monotonic() - began, 3)
    failed = [report.name for report in reports if not report.passed]
    if as_json:
        print_json(
            {
                "architectures": [report.to_json() for report in reports],
                "numerics": numerics(engine.CHUNK).to_json(),
                "duration_s": seconds,
                "passed": not failed,
            }
        )
        return not failed
    rows = [row(report) for report in reports]
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    else:
        print_table(COLUMNS, rows)
    print_facts(
        [
            ("on", describe_numerics(numerics(engine.CHUNK))),
            ("took", f"{seconds:.1f} s"),
            ("result", f"FAILED: {', '.join(failed)}" if failed else "passed"),
        ]
    )
    return not failed


@contextlib.contextmanager
def _running() -> Iterator[Callable[[str], None]]:
    """A line on standard error while it runs, if that is a terminal; takes the text."""
    console = stderr()
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what: progress.update(task, description=what)
