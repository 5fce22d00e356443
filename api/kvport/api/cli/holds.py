"""`kvport cache pins` and `unpin`: why state stays."""

import sys

import rich_click as click

from kvport.api.admin_bodies import ReleaseBody
from kvport.api.cli.output import json_option, print_json, print_table
from kvport.api.cli.reach import Place, place_options, reached
from kvport.api.cli.removal import print_freed


@click.command()
@place_options
@json_option
def pins(*, place: Place, as_json: bool) -> None:
    """Pins, and leases of what runs: why state stays.

    Each has an owner and a fixed end. A lease ends by itself; a pin can be ended by
    `kvport cache unpin`.
    """
    with reached(place) as admin:
        found = admin.pins()
    if as_json:
        print_json(found)
        return
    print_table(
        ("what", "owner", "namespace", "node", ">tokens", ">seconds left"),
        (
            (
                what, one["owner"], one["namespace"][:8], one["node"][:12],
                str(one["tokens"]), f"{one['seconds_left']:.0f}",
            )
            for what, ones in (("pin", found["pins"]), ("lease", found["leases"]))
            for one in ones
        ),
    )  # fmt: skip


@click.command()
@click.argument("owner")
@click.argument("node", required=False)
@place_options
@json_option
def unpin(*, owner: str, node: str | None, place: Place, as_json: bool) -> None:
    """End pins of one owner, and of nobody else.

    OWNER and NODE are as `kvport cache pins` shows them; without NODE all pins of the
    owner end. What they held beyond a quota or the cap goes at once. Exits with 1 if
    there is none.
    """
    with reached(place) as admin:
        found = admin.release(ReleaseBody(owner=owner, node=node))
    if as_json:
        print_json(found)
    else:
        count = found["released"]
        what = "1 pin" if count == 1 else f"{count} pins"
        click.echo(f"{what} ended" if count else f"nothing is pinned by {owner}")
        if found["removed"]:
            print_freed(found)
    if not found["released"]:
        sys.exit(1)
