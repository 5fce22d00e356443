"""`kvport export` and `kvport import`: state out of a server and into one."""

import contextlib
import sys
from collections.abc import Iterator
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

from kvport.api.cli.connect import chosen
from kvport.api.cli.options import FILE, model_option, server_options
from kvport.api.cli.output import (
    format_bytes,
    json_option,
    print_facts,
    print_json,
    say,
    stderr,
)
from kvport.api.cli.prompts import prompt_options
from kvport.api.client import Client, PromptArguments
from kvport.api.files import Progress

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
@model_option
@server_options
@json_option
def export(
    *,
    prompt: PromptArguments,
    output: Path,
    model: str | None,
    home: Path,
    url: str | None,
    as_json: bool,
) -> None:
    """Write a prompt's state to a signed file.

    The state is of the longest part of the prompt that can be restored; the server
    must have computed it, so send the prompt with `kvport complete` first. The file
    contains the prompt: keep it as private as that.
    """
    to_stdout = output == _STANDARD
    if to_stdout and as_json:
        raise click.UsageError("--json and the file cannot both go to standard output.")
    with Client.for_home(home, url) as client, _progress("export") as progress:
        name = chosen(client, model)
        to = sys.stdout.buffer if to_stdout else output
        info = client.export(name, to, progress=progress, **prompt)
        # Here, where a failure is still told.
        sys.stdout.flush()
    if as_json:
        print_json(attrs.asdict(info) | {"model": name, "file": str(output)})
        return
    size = format_bytes(info.size_bytes)
    summary = f"exported {info.restorable_tokens} tokens of {name} ({size})"
    if to_stdout:
        say(summary)
    else:
        click.echo(f"{summary} to {output}")


@click.command("import")
@click.argument("file", type=FILE)
@model_option
@server_options
@json_option
def import_(
    *, file: Path, model: str | None, home: Path, url: str | None, as_json: bool
) -> None:
    """Bring the state in a file into a server.

    The server checks all of FILE, which must be signed by a key that it trusts, and
    belong to a model that it holds. A file that is refused changes nothing.
    """
    with Client.for_home(home, url) as client, _progress("import") as progress:
        source: Path | BinaryIO = sys.stdin.buffer if file == _STANDARD else file
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
