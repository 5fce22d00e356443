"""`kvport probe`, `kvport cache stats`, `kvport cache artifacts`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import rich_click as click

from kvport.api.arguments import PromptArguments
from kvport.api.cli.connect import chosen, connected
from kvport.api.cli.options import POLICY, Server, model_option, server_options
from kvport.api.cli.output import (
    STATE_NAMES,
    format_bytes,
    json_option,
    print_facts,
    print_json,
    print_table,
    short_digest,
)
from kvport.api.cli.prompts import prompt_options

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
@server_options
@json_option
def stats(*, server: Server, as_json: bool) -> None:
    """Sizes, hits and misses, and the cap."""
    with connected(server) as client:
        found = client.stats()
    if as_json:
        print_json(found)
        return
    print_facts(_cache_facts(found["cache"]))
    for name, counts in found["models"].items():
        click.echo(f"\nmodel {name}")
        print_facts(
            (f"  {what.replace('_', ' ')}", str(count))
            for what, count in counts.items()
        )


@click.command()
@server_options
@json_option
def artifacts(*, server: Server, as_json: bool) -> None:
    """Artifacts that went out or came in.

    `kept` is a file's state that is still in the cache. Whole ids are in --json.
    """
    with connected(server) as client:
        found = client.artifacts()
    if as_json:
        print_json({"artifacts": [attrs.asdict(artifact) for artifact in found]})
        return
    print_table(
        ("recorded", "way", "model", ">tokens", ">size", "state", "artifact"),
        (
            (
                one.recorded,
                _WAYS.get(one.direction, one.direction),
                one.model,
                str(one.restorable_tokens),
                format_bytes(one.size_bytes),
                "kept" if one.stored else "gone",
                short_digest(one.artifact_id),
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
            f"{STATE_NAMES[blob_class]} {format_bytes(size)}"
            for blob_class, size in namespace["nbytes"].items()
        )
        tokens, nodes = namespace["tokens"], namespace["nodes"]
        yield "namespace", f"{namespace['id'][:8]} (scope {namespace['scope']})"
        yield "  stored", f"{tokens} tokens in {nodes} segments; {sizes or 'nothing'}"
    per_token = cache["written_per_token"]
    for blob_class, size in cache["written"].items():
        written = f"{STATE_NAMES[blob_class]} {format_bytes(size)}"
        if blob_class in per_token:
            written += f" ({format_bytes(round(per_token[blob_class]))} per new token)"
        yield "written", written
    for blob_class, pruned in cache["pruned"].items():
        size = format_bytes(pruned["nbytes"])
        yield "pruned", f"{STATE_NAMES[blob_class]} {size} in {pruned['blobs']} blobs"
    if failed := cache["failed_prunings"]:
        yield "not pruned", f"{failed} paths"
    yield "leases", str(cache["leases"])
    for reason, count in cache["removed"].items():
        yield "removed", f"{count} segments: {reason}"
    for reason, count in cache["skipped"].items():
        yield "not stored", f"{count} segments: {reason}"
    yield "damaged", f"{cache['damaged']} blobs"
