"""What commands print: JSON lines, tables, sizes, errors."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import rich_click as click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kvport.manifest.errors import KvportError

_Command = TypeVar("_Command", bound=Callable[..., Any])

_JSON: Final = "kvport.json"
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_DIGITS_IN_GROUP: Final = 4
_GROUPS: Final = 8


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
    if error.fields:
        console.print(Text(f"  differs: {', '.join(error.fields)}"))
    console.print(Text(f"  {error.advice}"))


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


def format_bytes(size: int) -> str:
    """A size for people, in binary units."""
    value, unit = float(size), "B"
    for larger in _UNITS:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def fingerprint(key_id: str) -> str:
    """128 bits of a key id in groups of four digits, for two people to compare."""
    digits = key_id.partition(":")[2]
    starts = range(0, _GROUPS * _DIGITS_IN_GROUP, _DIGITS_IN_GROUP)
    return " ".join(digits[start : start + _DIGITS_IN_GROUP] for start in starts)
