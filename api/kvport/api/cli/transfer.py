"""`kvport export` and `kvport import`: state out of a server and into one."""

import contextlib
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import rich_click as click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from kvport.api.arguments import PromptArguments
from kvport.api.cli.connect import chosen, connected
from kvport.api.cli.errors import LocalFileError, check_readable, naming
from kvport.api.cli.options import FILE, RECIPIENT, Server, model_option, server_options
from kvport.api.cli.output import json_option, print_facts, print_json, say, stderr
from kvport.api.cli.prompts import prompt_options
from kvport.api.files import Progress
from kvport.api.problems import ProblemError
from kvport.api.results import ExportInfo
from kvport.manifest.recipients import Recipient
from kvport.snapshot.units import format_bytes

_STANDARD: Final = Path("-")


@click.command()
@prompt_options
@click.option(
    "-o",
    "--output",
    type=FILE,
    required=True,
    help="Where the file goes; `-` is standard output.",
)
@click.option(
    "--min-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write nothing unless the state of N tokens of the prompt, or more, is here.",
)
@click.option(
    "--compress",
    is_flag=True,
    help="Make the file smaller, without loss; the server takes longer to write it.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="List it in `kvport cache artifacts`, and let it be downloaded again, as long"
    " as its state is stored.",
)
@click.option(
    "--session",
    metavar="LABEL",
    help="The conversation that it is of: whoever imports the file takes no older one"
    " of the same conversation afterwards.",
)
@click.option(
    "--to",
    "recipients",
    type=RECIPIENT,
    multiple=True,
    metavar="KEY",
    help="Seal the file, so that only the machine whose `kvport keys recipient` prints"
    " this key can read it (repeatable).",
)
@model_option
@server_options
@json_option
def export(
    *,
    prompt: PromptArguments,
    output: Path,
    min_tokens: int | None,
    compress: bool,
    keep: bool,
    session: str | None,
    recipients: tuple[Recipient, ...],
    model: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """Write a prompt's state to a signed file.

    The state is of the longest part of the prompt that can be restored; the server
    must have computed it, so send the prompt with `kvport complete` first. The file
    contains the prompt: keep it as private as that, or seal it.
    """
    if output == _STANDARD and as_json:
        raise click.UsageError("--json and the file cannot both go to standard output.")
    with connected(server) as client, _writing(output) as (to, progress):
        name = chosen(client, model)
        if keep:
            kept = client.keep(
                name,
                min_tokens=min_tokens,
                compress=compress,
                session=session,
                recipients=recipients,
                **prompt,
            )
            done = client.download(kept.artifact_id, to, progress=progress)
            info = ExportInfo(**attrs.asdict(done), prompt_tokens=kept.prompt_tokens)
        else:
            info = client.export(
                name,
                to,
                min_tokens=min_tokens,
                compress=compress,
                session=session,
                recipients=recipients,
                progress=progress,
                **prompt,
            )
    if as_json:
        print_json(attrs.asdict(info) | {"model": name, "file": str(output)})
        return
    asked = info.prompt_tokens or info.restorable_tokens
    summary = (
        f"exported {info.restorable_tokens} of {asked} prompt tokens"
        f" ({format_bytes(info.size_bytes)})"
    )
    if output == _STANDARD:
        say(summary)
    else:
        click.echo(f"{summary} to {output}")
    # The last token of a prompt is always computed: its result is the first reply's.
    if info.restorable_tokens < asked - 1:
        say("The rest was never computed here: complete the prompt first to carry it.")


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[tuple[Path | BinaryIO, Progress | None]]:
    """Where an artifact goes, and who is told how much of it went there."""
    to_stdout = output == _STANDARD
    if not to_stdout and (output.is_dir() or not output.parent.is_dir()):
        reason = "is a directory" if output.is_dir() else "no such directory"
        raise LocalFileError(f"{output}: {reason}")
    try:
        with _progress("export") as progress:
            yield sys.stdout.buffer if to_stdout else output, progress
            # Here, where a failure is still told.
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # The system names the file that stands in for it until it is complete.
        raise LocalFileError.at(output, error) from error


@click.command("import")
@click.argument("file", type=FILE)
@click.option(
    "--model",
    metavar="NAME",
    help="The model that it must be for; the server finds the right one unless given.",
)
@server_options
@json_option
def import_(*, file: Path, model: str | None, server: Server, as_json: bool) -> None:
    """Bring the state in a file into a server.

    The server checks all of FILE, which must be signed by a key that it trusts, and
    belong to a model that it holds. A file that is refused changes nothing.
    """
    check_readable(file)
    with connected(server) as client, _progress("import") as progress:
        source: Path | BinaryIO = sys.stdin.buffer if file == _STANDARD else file
        with _refused(file):
            info = client.import_(source, model=model, progress=progress)
    if as_json:
        print_json(attrs.asdict(info))
        return
    print_facts(
        [
            ("imported", info.artifact_id),
            ("model", info.model),
            ("restorable", f"{info.restored_tokens} tokens"),
            (
                "segments",
                f"{info.admitted_segments} new, {info.present_segments} were here",
            ),
        ]
    )


@contextlib.contextmanager
def _refused(file: Path) -> Iterator[None]:
    """Name the file where the server refuses what is in it."""
    try:
        yield
    except ProblemError as error:
        if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        with naming(file):
            raise


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield None
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        # The server reports no total for a stream.
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
