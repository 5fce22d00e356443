"""`kvport cache scrub`: read what is stored, before someone needs it."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import rich_click as click

from kvport.api.admin_bodies import SCRUB_RATE, ScrubBody
from kvport.api.admin_client import Administered, Answer
from kvport.api.cli.options import SIZE
from kvport.api.cli.output import json_option, print_facts, print_json, say, stderr
from kvport.api.cli.reach import Place, place_options, reached
from kvport.snapshot.units import format_bytes

_POLL_SECONDS: Final = 0.2


@click.command()
@click.option(
    "--rate",
    type=SIZE,
    default=SCRUB_RATE,
    show_default="32MiB",
    help="Bytes per second.",
)
@click.option("--stop", is_flag=True, help="Stop the server's run, to go on later.")
@click.option("--status", is_flag=True, help="Only show how far it is.")
@place_options
@json_option
def scrub(*, rate: int, stop: bool, status: bool, place: Place, as_json: bool) -> None:
    """Read all that is stored, and remove what is damaged.

    It goes on from where the last run stopped. A server does it beside its requests,
    and the command returns at once: `--status` shows how far it is. Without a server
    the command does it, until its end or Ctrl-C.
    """
    if stop and status:
        raise click.UsageError("--stop and --status exclude each other.")
    with reached(place) as admin:
        if stop:
            if not admin.scrub()["running"]:
                say("no scrub is running")
            found = admin.stop_scrub()
        elif status:
            found = admin.scrub()
        else:
            found = admin.start_scrub(ScrubBody(bytes_per_second=rate))
            if admin.is_here:
                found = _finished(admin, found)
            elif found["running"]:
                say(
                    "The server reads on; `kvport cache scrub --status` shows how far"
                    " it is, `--stop` stops it."
                )
    if as_json:
        print_json(found)
        return
    facts = [
        ("running", "yes" if found["running"] else "no"),
        ("checked", _checked(found)),
        ("damaged", f"{found['damaged']} files"),
        ("remaining", f"{found['remaining']} files"),
        ("last whole run", found["completed"] or "none yet"),
    ]
    print_facts(facts)


def _finished(admin: Administered, found: Answer) -> Answer:
    """How it ended: it runs in this process, and no longer."""
    console = stderr()
    shown = console.status("reading") if console.is_terminal else None
    with shown or contextlib.nullcontext():
        while found["running"]:
            time.sleep(_POLL_SECONDS)
            found = admin.scrub()
            if shown is not None:
                shown.update(f"{_checked(found)}, {found['remaining']} to go")
    return found


def _checked(found: Mapping[str, Any]) -> str:
    return f"{found['checked']} files, {format_bytes(found['bytes'])}"
