"""`kvport probe`, `kvport cache artifacts`."""

from typing import Final

import attrs
import rich_click as click

from kvport.api.arguments import PromptArguments
from kvport.api.cli.connect import chosen, connected
from kvport.api.cli.options import POLICY, Server, model_option, server_options
from kvport.api.cli.output import (
    json_option,
    print_facts,
    print_json,
    print_table,
    short_digest,
)
from kvport.api.cli.prompts import prompt_options
from kvport.api.cli.reach import Place, place_options, reached
from kvport.snapshot.units import format_bytes

_WAYS: Final = {"exported": "out", "admitted": "in"}


@click.command()
@prompt_options
@click.option(
    "--policy",
    type=POLICY,
    help="Of the request that is asked about; the server's choice unless given.",
)
@model_option
@server_options
@json_option
def probe(
    *,
    prompt: PromptArguments,
    policy: str | None,
    model: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """How much of a prompt is restorable.

    Nothing is loaded or computed.
    """
    with connected(server) as client:
        info = client.probe(chosen(client, model), policy=policy, **prompt)
    if as_json:
        print_json(attrs.asdict(info))
        return
    print_facts(
        [
            ("prompt", f"{info.prompt_tokens} tokens"),
            ("stored", f"{info.stored_tokens} tokens"),
            ("restorable", f"{info.restorable_tokens} tokens"),
        ]
    )


@click.command()
@place_options
@json_option
def artifacts(*, place: Place, as_json: bool) -> None:
    """Imports, and exports that were kept with `export --keep`.

    An export that was only written to a file is not listed. `way` is `in` or `out`;
    `state` says whether the cache still holds what the file does: `stored` or `gone`.
    Whole ids are in --json.
    """
    with reached(place) as admin:
        found = admin.artifacts()
    if as_json:
        print_json(found)
        return
    print_table(
        ("recorded", "way", "model", ">tokens", ">size", "state", "artifact"),
        (
            (
                one["recorded"],
                _WAYS.get(one["direction"], one["direction"]),
                one["model"],
                str(one["restorable_tokens"]),
                format_bytes(one["size_bytes"]),
                "stored" if one["stored"] else "gone",
                short_digest(one["artifact_id"]),
            )
            for one in found["artifacts"]
        ),
    )
