"""`kvport models list`, `load` and `unload`: what a server holds.

A path is one of the server's machine; where it is a directory here as well, which is
the rule, it is sent as the whole path.
"""

import math

import attrs
import rich_click as click

from kvport.api.arguments import LoadArguments
from kvport.api.cli.connect import connected, describe_unloaded
from kvport.api.cli.options import KEEP_ALIVE, Server, server_options
from kvport.api.cli.output import json_option, print_json, print_table, say
from kvport.api.results import ModelInfo
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.engine.source import directory_at
from kvport.snapshot.units import format_bytes, format_seconds


@click.command("list")
@server_options
@json_option
def list_(*, server: Server, as_json: bool) -> None:
    """Models that a server holds.

    And, on standard error, those that it has unloaded since its start.
    """
    with connected(server) as client:
        found, gone = client.models(), client.unloaded_models()
    if as_json:
        print_json(
            {
                "models": [attrs.asdict(model) for model in found],
                "unloaded": [attrs.asdict(model) for model in gone],
            }
        )
        return
    print_table(
        ("model", "cache", "drafts", "keep alive"),
        (
            (
                m.name,
                _cache(m),
                "on" if m.drafted else "off",
                "for ever" if m.keep_alive is None else format_seconds(m.keep_alive),
            )
            for m in found
        ),
    )
    for one in gone:
        say(describe_unloaded(one))


@click.command()
@click.argument("path")
@click.option("--name", help="What requests call it; the last part of PATH by default.")
@click.option(
    "--keep-alive",
    type=KEEP_ALIVE,
    metavar="DURATION|never",
    help="Unload it after so long without a request; by default what holds for others.",
)
@server_options
@json_option
def load(
    *,
    path: str,
    name: str | None,
    keep_alive: float | None,
    server: Server,
    as_json: bool,
) -> None:
    """Have a server load a model.

    PATH is the model's directory or Hugging Face id. With --keep-alive it is unloaded
    after so long without a request; then requests are refused with `model_unloaded`
    until it is loaded again by this command: a request does not load it.
    """
    source = str(directory_at(path) or path)
    arguments = LoadArguments()
    if name is not None:
        arguments["name"] = name
    if keep_alive is not None:
        arguments["keep_alive"] = None if keep_alive == math.inf else int(keep_alive)
    with connected(server) as client:
        model = client.load_model(source, **arguments)
    if as_json:
        print_json(attrs.asdict(model))
    else:
        say(f"{model.name} is loaded (cache {_cache(model)})")


def _cache(model: ModelInfo) -> str:
    if not model.cached:
        return f"off: {model.refusal or 'not wanted'}"
    return "off (tier)" if model.state == Tier.OFF else model.state


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="End its requests instead of waiting.")
@server_options
@json_option
def unload(*, name: str, force: bool, server: Server, as_json: bool) -> None:
    """Have a server unload a model.

    Its requests finish before; new ones are refused at once.
    """
    with connected(server) as client:
        gone = client.unload_model(name, force=force)
    if as_json:
        print_json(attrs.asdict(gone))
    else:
        freed = format_bytes(gone.weight_bytes)
        state = "its state is kept"
        if gone.reclaimed:
            state = f"{format_bytes(gone.freed_bytes)} of its state are removed"
        kept = "".join(
            f", {count} segments kept: {why}" for why, count in gone.kept.items()
        )
        say(f"{name} is unloaded: {freed} of weights are free, {state}{kept}")
