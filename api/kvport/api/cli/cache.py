"""`kvport probe`, `kvport cache stats`, `kvport cache artifacts`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import rich_click as click

from kvport.api.cli.connect import chosen
from kvport.api.cli.options import model_option, server_options
from kvport.api.cli.output import (
    format_bytes,
    json_option,
    print_facts,
    print_json,
    print_table,
)
from kvport.api.cli.prompts import Prompt, prompt_options
from kvport.api.client import Client


@click.command()
@prompt_options
@model_option
@server_options
@json_option
def probe(
    *,
    prompt: Prompt,
    model: str | None,
    home: Path,
    url: str | None,
    as_json: bool,
) -> None:
    """How much of a prompt is restorable.

    Nothing is loaded or computed.
    """
    with Client.for_home(home, url) as client:
        info = client.probe(chosen(client, model), **prompt)
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
@server_options
@json_option
def stats(*, home: Path, url: str | None, as_json: bool) -> None:
    """Sizes, hits and misses, and the cap."""
    with Client.for_home(home, url) as client:
        found = client.stats()
    if as_json:
        print_json(found)
        return
    cache = found["cache"]
    print_facts(
        [
            *((f"account {name}", _number(value)) for name, value in _flat(cache["account"])),
            ("leases", str(cache["leases"])),
        ]
    )


@click.command()
@server_options
@json_option
def artifacts(*, home: Path, url: str | None, as_json: bool) -> None:
    """Artifacts that went out or came in."""
    with Client.for_home(home, url) as client:
        found = client.artifacts()
    if as_json:
        print_json({"artifacts": [attrs.asdict(artifact) for artifact in found]})
        return
    print_table(
        ("recorded", "direction", "model", ">tokens", ">size", "state", "artifact"),
        (
            (
                one.recorded,
                one.direction,
                one.model,
                str(one.restorable_tokens),
                format_bytes(one.size_bytes),
                "stored" if one.stored else "gone",
                one.artifact_id,
            )
            for one in found
        ),
    )


def _flat(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from data.items()


def _number(value: Any) -> str:
    return str(value)
