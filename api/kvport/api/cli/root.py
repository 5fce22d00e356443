"""The root of the command line: turns errors into messages and exit codes."""

import importlib.metadata
import os
from typing import Final

import rich_click as click

from kvport.api.cli.errors import LocalFileError
from kvport.api.cli.output import report
from kvport.api.cli.tree import LazyGroup, Panels
from kvport.manifest.errors import KvportError

_INTERRUPTED: Final = 130
"""What shells report for a process that Ctrl-C ended."""


class Root(LazyGroup):
    """The group of all commands."""

    def __init__(self, name: str, text: str, panels: Panels) -> None:
        super().__init__(name, text, panels)
        version = importlib.metadata.version("kvport")
        click.version_option(version, prog_name="kvport")(self)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; whatever is refused ends with a message and code 1."""
        try:
            super().invoke(ctx)
        except KvportError as error:
            report(error, ctx)
            ctx.exit(1)
        except BrokenPipeError:
            # Whoever read our output has enough. What Python would still flush at exit
            # goes nowhere instead of raising again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(1)
        except OSError as error:
            report(LocalFileError.of(error), ctx)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
