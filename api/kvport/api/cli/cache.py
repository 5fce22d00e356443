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
from kvport.api.cli.prompts import prompt_options
from kvport.api.client import Client, PromptArguments


@click.command()
@prompt_options
@model_option
@server_options
@json_option
def probe(
    *,
    prompt: PromptArguments,
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
    print_facts(_cache_facts(found["cache"]))
    for name, counts in found["models"].items():
        click.echo(f"\nmodel {name}")
        print_facts((f"  {what}", str(count)) for what, count in counts.items())


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


def _cache_facts(cache: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    account = cache["account"]
    used = sum(account[name] for name in ("blobs", "index", "overhead", "held"))
    yield "used", f"{format_bytes(used)} of {format_bytes(account['cap'])}"
    for name in ("blobs", "index", "overhead", "held"):
        yield f"  {name}", format_bytes(account[name])
    for namespace in cache["namespaces"]:
        sizes = ", ".join(
            f"{blob_class} {format_bytes(size)}"
            for blob_class, size in namespace["nbytes"].items()
        )
        tokens, nodes = namespace["tokens"], namespace["nodes"]
        yield "namespace", f"{namespace['id']} (scope {namespace['scope']})"
        yield "  stored", f"{tokens} tokens in {nodes} segments; {sizes or 'nothing'}"
    yield "leases", str(cache["leases"])
    for reason, count in cache["removed"].items():
        yield "removed", f"{count} segments: {reason}"
    for reason, count in cache["skipped"].items():
        yield "not stored", f"{count} segments: {reason}"
    yield "damaged", f"{cache['damaged']} blobs"
