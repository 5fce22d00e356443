"""What commands print: JSON lines, tables, sizes, errors."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import rich_click as click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kvport.manifest.errors import BindingMismatchError, KvportError
from kvport.manifest.identity import FINGERPRINT_DIGITS, Numerics
from kvport.manifest.layout import BlobClass

_Command = TypeVar("_Command", bound=Callable[..., Any])

_JSON: Final = "kvport.json"
_HEX: Final = frozenset("0123456789abcdef")

STATE_NAMES: Final[Mapping[str, str]] = {
    BlobClass.KV.value: "attention",
    BlobClass.WINDOW.value: "sliding-window",
    BlobClass.STATE.value: "recurrent",
}
"""What blobs of each class hold, for people."""


def json_option(command: _Command) -> _Command:
    """Add `--json`, as the parameter `as_json`; errors are then JSON too."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:  # noqa: FBT001 -- click's
        ctx.meta[_JSON] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=remember,
        help="Print one line of JSON and nothing else, for scripts.",
    )(command)


def asks_json(ctx: click.Context, args: Sequence[str]) -> None:
    """Remember whether arguments that may be wrong otherwise ask for JSON."""
    options = itertools.takewhile(lambda arg: arg != "--", args)
    ctx.meta[_JSON] = "--json" in options


def print_json(data: Mapping[str, Any]) -> None:
    """One line on standard output."""
    click.echo(json.dumps(data))


def report(error: KvportError, ctx: click.Context) -> None:
    """Tell of an error: on standard output with `--json`, else on standard error."""
    if ctx.meta.get(_JSON):
        problem = {
            "code": error.code,
            "title": error.cause,
            "detail": error.message,
            "advice": error.advice,
        }
        print_json(problem | ({"fields": error.fields} if error.fields else {}))
        return
    console = stderr()
    # As Text: messages may hold brackets, which rich would take for markup.
    console.print(Text.assemble((f"error[{error.code}]", "bold red"), f": {error}"))
    if any(field not in error.message for field in error.fields):
        differ = error.code == BindingMismatchError.code
        label = "differs" if differ else "field" if len(error.fields) == 1 else "fields"
        console.print(Text(f"  {label}: {', '.join(error.fields)}"))
    console.print(Text(f"  {error.advice}"))


def report_usage(error: click.UsageError, ctx: click.Context) -> bool:
    """Tell of wrong usage on standard output, if `--json` asks for it.

    Returns:
        Whether it was told.
    """
    if not ctx.meta.get(_JSON):
        return False
    command = (error.ctx or ctx).command_path
    print_json(
        {
            "code": "usage",
            "title": "The command line is not one that the command takes.",
            "detail": error.format_message(),
            "advice": f"See `{command} --help`.",
        }
    )
    return True


def stderr() -> Console:
    """For messages and progress, made anew since tests exchange the stream."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """A message for people, on standard error."""
    click.echo(text, err=True)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Name and value in two columns, on standard output; as many lines as facts."""
    rows = list(facts)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}".rstrip())


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on standard output, never cut; columns named `>...` align right."""
    names = list(columns)
    table = [[name.removeprefix(">") for name in names], *map(list, rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            set_cell_size(cell, width)
            if not name.startswith(">")
            else cell.rjust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def is_fingerprint(text: str) -> bool:
    """Whether a text has the form of a fingerprint, spaced or not."""
    digits = text.replace(" ", "").lower()
    return len(digits) == FINGERPRINT_DIGITS and set(digits) <= _HEX


def short_digest(digest: str) -> str:
    """The beginning of a digest or id, for tables."""
    return digest.partition(":")[2][:8]


def describe_numerics(numerics: Numerics) -> str:
    """Where and how state was computed, for people."""
    parts = (numerics.device, numerics.gpu_family, numerics.blas)
    device = " ".join(part for part in parts if part)
    compiled = "" if numerics.compile else ", kernels not compiled"
    return f"mlx {numerics.mlx} on {device}, chunk {numerics.chunk}{compiled}"
