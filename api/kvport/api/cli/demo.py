"""`kvport demo`: the whole way of a prompt's state, shown on tiny models."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import rich_click as click
from click.exceptions import Exit
from rich import box
from rich.console import Console
from rich.table import Table

from kvport.api.cli.output import json_option, print_json, say, stderr
from kvport.api.demo.run import SUBJECTS, run
from kvport.api.demo.servers import ended_in_order
from kvport.api.demo.story import Outcome, Say
from kvport.snapshot.units import format_bytes

_EXPLANATION: Final = """\
Two servers, each with a home of its own, held the same tiny model. A computed a prompt
(cold) and answered it again from its cache (hot). B never computed it: it imported the
signed file that A had exported, and answered the same prompt (imported), then the next
turn of the conversation."""
_GUARANTEE: Final = """\
Guaranteed on equal machines: B's answer equals A's hot answer in every bit (here: all
reported log-probabilities of 32 greedy tokens). Against a cold answer the last bits may
differ, unless a request asks for the policy `exact`."""


@click.command()
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep models, homes and files in DIR, which must be new or empty.",
)
@json_option
def demo(*, keep: Path | None, as_json: bool) -> None:
    """Show all of it on tiny models, in under a minute.

    Builds a dense, a hybrid and a window model, and for each of them carries a long
    prompt's state from one server to another. Ends with 1 if an answer differs.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.BadParameter("the directory is not empty", param_hint="--keep")
    with _work(keep) as work, _saying(quiet=as_json) as tell, ended_in_order():
        outcomes = list(run(work, tell))
    if as_json:
        print_json({"models": [outcome.to_json() for outcome in outcomes]})
    else:
        _print(outcomes)
    if not all(outcome.passed for outcome in outcomes):
        raise Exit(1)


@contextlib.contextmanager
def _work(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kvport-demo-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def _saying(*, quiet: bool) -> Iterator[Say]:
    """What happens next, on standard error: one line that changes on a terminal."""
    console = stderr()
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield say


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for one in outcomes:
        table.add_column(one.model, justify="right")
    for label, show in _ROWS:
        table.add_row(label, *map(show, outcomes))
    console = Console(highlight=False)
    console.print(f"\n{_EXPLANATION}", soft_wrap=True)
    console.print(table)
    console.print(_GUARANTEE, soft_wrap=True)


_KINDS: Final = {subject.model: subject.kind for subject in SUBJECTS}
_ROWS: Final[tuple[tuple[str, Callable[[Outcome], str]], ...]] = (
    ("kind of state", lambda one: _KINDS[one.model]),
    ("prompt tokens", lambda one: f"{one.prompt_tokens}"),
    ("first token, cold (A)", lambda one: _seconds(one.cold_ttft_s)),
    ("first token, hot (A)", lambda one: _seconds(one.hot_ttft_s)),
    ("export (A)", lambda one: _seconds(one.export_s)),
    ("file", lambda one: format_bytes(one.artifact_bytes)),
    ("import (B)", lambda one: _seconds(one.import_s)),
    ("first token, imported (B)", lambda one: _seconds(one.imported_ttft_s)),
    ("restored tokens (B)", lambda one: f"{one.restored_tokens}"),
    ("identical to hot", lambda one: "yes" if one.identical_to_hot else "NO"),
    ("largest difference to cold", lambda one: f"{one.max_diff_to_cold:.1e}"),
    (
        "next turn, restored (B)",
        lambda one: f"{one.next_turn_restored_tokens} of {one.next_turn_tokens}",
    ),
)


def _seconds(time: float) -> str:
    return f"{time:.3f} s"
