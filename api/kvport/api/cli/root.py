"""The root of the command line: turns errors into messages and exit codes."""

import importlib.metadata
import os
from typing import Any, Final

import rich_click as click

from kvport.api.cli.output import report
from kvport.api.cli.tree import LazyGroup, Panels
from kvport.manifest.errors import KvportError

_INTERRUPTED: Final = 130
"""What shells report for a process that Ctrl-C ended."""


class Root(LazyGroup):
    """The group of all commands."""

    def __init__(self, name: str, text: str, panels: Panels) -> None:
        super().__init__(name, text, panels)
        version = click.version_option(
            importlib.metadata.version("kvport"), prog_name="kvport"
        )
        version(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever kvport refuses ends with code 1."""
        try:
            return super().invoke(ctx)
        except KvportError as error:
            report(error)
        except BrokenPipeError:
            # Whoever read our output has enough. What Python would still flush at exit
            # goes nowhere instead of raising again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        ctx.exit(1)
