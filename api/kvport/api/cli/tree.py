"""Groups whose commands are imported when they are used.

A group's help must not import what its commands need: the lines that it shows stand in
the group's table, and a test holds them to be the commands' own.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final

import rich_click as click
from rich_click import RichCommand, RichGroup
from rich_click.rich_panel import RichCommandPanel

_PACKAGE: Final = "kvport.api.cli"

Target = tuple[str, str]
"""`module:attribute` below this package, and the line for the group's help."""
Panels = Mapping[str, Mapping[str, "Target | LazyGroup"]]
"""Title of a panel in the help, to names of commands, to what they are."""


class LazyCommand(RichCommand):
    """A command of which only the name and one line of help are known yet."""

    def __init__(self, name: str, target: Target) -> None:
        super().__init__(name=name, short_help=target[1])
        self._target = target[0]

    def load(self) -> click.Command:
        """The command itself."""
        module, _, attribute = self._target.partition(":")
        loaded = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)
        if not isinstance(loaded, click.Command):
            raise TypeError(f"{self._target} is not a command")
        return loaded

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """A context of the command itself, which click then invokes."""
        return self.load().make_context(info_name, args, parent, **extra)


class LazyGroup(RichGroup):
    """A group of lazily imported commands."""

    def __init__(
        self, name: str, text: str, panels: Panels, default: str | None = None
    ) -> None:
        """A group.

        Args:
            name: what the user types.
            text: its help.
            panels: its commands, in the order in which the help shows them.
            default: the command that is meant if none is named.
        """
        self._default: Final = default
        super().__init__(
            name=name,
            help=text,
            short_help=text.partition("\n")[0],
            commands={
                command: LazyCommand(command, entry)
                if isinstance(entry, tuple)
                else entry
                for panel in panels.values()
                for command, entry in panel.items()
            },
            panels=[
                RichCommandPanel(title, commands=list(panel))
                for title, panel in panels.items()
            ],
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, with the name of the default command put in."""
        if self._default is not None and not (
            args and (args[0] in {*self.commands, *ctx.help_option_names})
        ):
            args = [self._default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's
        """Names in the order of the panels."""
        return list(self.commands)
