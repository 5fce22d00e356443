"""`kvport serve`: a node, its models, and its HTTP server, until a signal.

What can be refused without mlx and the web framework is refused here, before they are
imported; `serving` does the rest.
"""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import rich_click as click

from kvport.api.cli.options import (
    KV_BITS,
    KV_GROUP_SIZE,
    POLICY,
    Size,
    home_option,
)
from kvport.api.cli.output import json_option
from kvport.api.cli.starting import Source, Start, claimed, named
from kvport.manifest.limits import BLOCK_TOKENS
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.errors import SettingError

CHUNK: Final = 512
STRIDE: Final = 4096
"""Of `Tuning`, which is not imported for them; a test compares."""
_PORT: Final = 8470
_AUTO: Final = "auto"


class Cap(Size):
    """A size, or `auto`, which is none."""

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Bytes; 0 for `auto`."""
        return 0 if value in {_AUTO, 0} else super().convert(value, param, ctx)


@click.command()
@click.option(
    "--model",
    "models",
    metavar="[NAME=]PATH",
    multiple=True,
    required=True,
    help="A model's directory or Hugging Face id (repeatable). Its name is the last"
    " part of the path unless NAME is given.",
)
@home_option
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where stored state goes, also on another volume; <home>/cache unless given.",
)
@click.option(
    "--cap",
    type=Cap(),
    metavar="SIZE|auto",
    default=_AUTO,
    show_default=True,
    help="Hard limit of the cache on disk, such as 50GiB; `auto` is half of what is"
    " free.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Traffic is not encrypted: leave it on loopback.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=_PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--policy",
    type=POLICY,
    default=Policy.NEAREST.value,
    show_default=True,
    help="For requests that name none: `nearest` restores as much as is stored,"
    " `exact` only what equals an empty cache's answer bit for bit.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=CHUNK,
    show_default=True,
    help="Tokens that prefill evaluates at once; a multiple of the block size.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=STRIDE,
    show_default=True,
    help="Tokens between restore points of a prompt; a multiple of the chunk.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, BLOCK_TOKENS),
    default=BLOCK_SIZE,
    show_default=True,
    help="Tokens in a block. Files fit only servers with the same block size.",
)
@click.option("--no-cache", is_flag=True, help="Store and restore nothing.")
@click.option(
    "--live-memory",
    type=Size(),
    default=None,
    help="Memory per model for the state of running requests; what does not fit waits."
    " By default half of what the model leaves.",
)
@click.option(
    "--exit-with-stdin",
    is_flag=True,
    hidden=True,
    help="End when standard input does, as when the process that started this dies.",
)
@KV_BITS
@KV_GROUP_SIZE
@json_option
def serve(
    *,
    models: tuple[str, ...],
    home: Path,
    cache_dir: Path | None,
    cap: int,
    host: str,
    port: int,
    policy: str,
    chunk: int,
    stride: int,
    block_size: int,
    no_cache: bool,
    live_memory: int | None,
    kv_bits: str | None,
    kv_group_size: str,
    exit_with_stdin: bool,
    as_json: bool,
) -> None:
    """Run a server that holds models and their cache.

    Says in one line on standard output when it is ready; its log goes to standard
    error. The other commands find it through the home. Ctrl-C ends it.
    """
    if chunk % block_size:
        raise click.BadParameter(
            f"{chunk} is not a multiple of the block size, {block_size}",
            param_hint="--chunk",
        )
    if stride % chunk:
        raise click.BadParameter(
            f"{stride} is not a multiple of the chunk, {chunk}", param_hint="--stride"
        )
    sources = [named(model) for model in models]
    _check_names(sources)
    if exit_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    start = Start(
        home=home,
        sources=sources,
        cache_root=cache_dir,
        cap_bytes=cap or None,
        host=host,
        port=port,
        policy=Policy(policy),
        chunk=chunk,
        stride=stride,
        block_size=block_size,
        cache_enabled=not no_cache,
        live_bytes=live_memory,
        kv_bits=int(kv_bits) if kv_bits else None,
        kv_group_size=int(kv_group_size),
        as_json=as_json,
    )
    with claimed(home) as claim:
        # mlx and the web framework: seconds in which clients must see a server start.
        from kvport.api.cli.serving import run  # noqa: PLC0415 -- see above

        run(start, claim)


def _check_names(sources: Sequence[Source]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"two models are called {name!r}; name one NAME=PATH")


def _end_with_stdin() -> None:
    # Not sys.stdin: its lock, held by a thread, would crash the interpreter at exit.
    while os.read(0, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
