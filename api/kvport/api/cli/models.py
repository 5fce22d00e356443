"""`kvport models list`: what a server holds."""

import attrs
import rich_click as click

from kvport.api.cli.connect import connected
from kvport.api.cli.options import Server, server_options
from kvport.api.cli.output import json_option, print_json, print_table


@click.command("list")
@server_options
@json_option
def list_(*, server: Server, as_json: bool) -> None:
    """Models that a server holds."""
    with connected(server) as client:
        found = client.models()
    if as_json:
        print_json({"models": [attrs.asdict(model) for model in found]})
        return
    print_table(
        ("model", "cache", "drafts"),
        (
            (
                m.name,
                "on" if m.cached else f"off: {m.refusal or ''}",
                "on" if m.drafted else "off",
            )
            for m in found
        ),
    )
