"""The root of the command line: turns errors into messages and exit codes."""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator

import rich_click as click
from click.exceptions import Exit, NoArgsIsHelpError

from kvport.api.cli import INTERRUPTED
from kvport.api.cli.errors import LocalFileError
from kvport.api.cli.output import asks_json, report, report_usage, say
from kvport.api.cli.tree import LazyGroup, Panels
from kvport.manifest.errors import KvportError


class Root(LazyGroup):
    """The group of all commands."""

    def __init__(self, name: str, text: str, panels: Panels) -> None:
        super().__init__(name, text, panels)
        version = importlib.metadata.version("kvport")
        click.version_option(version, prog_name="kvport")(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments before the command's name."""
        asks_json(ctx, args)
        with _reported(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; whatever is refused ends with a message and code 1."""
        with _reported(ctx):
            super().invoke(ctx)


@contextlib.contextmanager
def _reported(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        # Without --json click itself shows it, and ends with the same code.
        if isinstance(error, NoArgsIsHelpError) or not report_usage(error, ctx):
            raise
        raise Exit(error.exit_code) from error
    except KvportError as error:
        report(error, ctx)
        raise Exit(1) from error
    except BrokenPipeError as error:
        # Whoever read our output has enough. What Python would still flush at exit
        # goes nowhere instead of raising again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise Exit(1) from error
    except OSError as error:
        report(LocalFileError.of(error), ctx)
        raise Exit(1) from error
    except KeyboardInterrupt as error:
        say("interrupted")
        raise Exit(INTERRUPTED) from error
