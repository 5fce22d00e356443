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

from kvport.api.cli import per_model
from kvport.api.cli.options import (
    AUTO,
    AUTO_FLOOR,
    CAP,
    FLOOR,
    POLICY,
    SIZE,
    home_option,
    kv_form_options,
)
from kvport.api.cli.output import json_option
from kvport.api.cli.starting import Source, Start, claimed, named
from kvport.manifest.limits import BLOCK_TOKENS
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.errors import SettingError
from kvport.snapshot.state.kv_form import KvForm

CHUNK: Final = 512
STRIDE: Final = 4096
"""Of `Tuning`, which is not imported for them; a test compares."""
_PORT: Final = 8470


@click.command()
@click.option(
    "--model",
    "models",
    metavar="[NAME=]PATH",
    multiple=True,
    help="A model's directory or Hugging Face id (repeatable). Its name is the last"
    " part of the path unless NAME is given. Others can be loaded later: `kvport models"
    " load`.",
)
@home_option
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where stored state goes, also on another volume; unless given, where the"
    " home's state is, at first <home>/cache.",
)
@click.option(
    "--cap",
    type=CAP,
    metavar="SIZE|auto",
    default=AUTO,
    show_default=True,
    help="Hard limit of the cache on disk, such as 50GiB; `auto` is half of what is"
    " free.",
)
@click.option(
    "--free-floor",
    type=FLOOR,
    metavar="SIZE|auto",
    default=AUTO,
    show_default=True,
    help="Free space that the cache leaves on its volume, also while other programs"
    " fill it; `auto` is the larger of 10GiB and 5%, 0 leaves none.",
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
    "--points",
    "point_values",
    metavar="[MODEL:]KEY=N,...",
    multiple=True,
    help="Restore points, for all models or one (repeatable; what is said last holds)."
    " `stride`: tokens between points of a prompt, before --stride. What stays of a"
    " conversation: stride points within the `newest` tokens of its end, older ones at"
    " multiples of `every`; the last `forks` (where the next turn parts from this one),"
    " `prompts` and `replies` (their ends). By default"
    " newest=32768,every=16384,forks=2,prompts=1,replies=1.",
)
@click.option(
    "--draft",
    "draft_values",
    metavar="[MODEL:]lookup|DIR|off",
    multiple=True,
    help="Guess the next tokens and verify several at once, for all models or one"
    " (repeatable): `lookup` finds guesses in the text itself, a directory holds a"
    " smaller model of the same vocabulary. One reply at a time is drafted, beside the"
    " others. It pays if guesses are right: `kvport cache stats` counts accepted ones.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Guesses that are verified at once, at most.",
)
@click.option(
    "--keep-alive",
    "keep_alive_values",
    metavar="[MODEL:]DURATION|never",
    multiple=True,
    help="Unload models, or one, after so long without a request, such as 30m"
    " (repeatable); `kvport models load` loads them again, a request does not. By"
    " default they stay.",
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
    type=SIZE,
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
@kv_form_options
@json_option
def serve(
    *,
    models: tuple[str, ...],
    home: Path,
    cache_dir: Path | None,
    cap: int,
    free_floor: int,
    host: str,
    port: int,
    policy: str,
    chunk: int,
    stride: int,
    point_values: tuple[str, ...],
    draft_values: tuple[str, ...],
    draft_tokens: int,
    keep_alive_values: tuple[str, ...],
    block_size: int,
    no_cache: bool,
    live_memory: int | None,
    kv_form: KvForm | None,
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
    names = [source.name for source in sources]
    points = per_model.points(point_values, names, stride=stride, chunk=chunk)
    drafts = per_model.drafts(draft_values, names, draft_tokens)
    keep_alives = per_model.keep_alives(keep_alive_values, names)
    if exit_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    start = Start(
        home=home,
        sources=sources,
        cache_root=cache_dir,
        cap_bytes=cap or None,
        free_floor=None if free_floor == AUTO_FLOOR else free_floor,
        host=host,
        port=port,
        policy=Policy(policy),
        chunk=chunk,
        points=points,
        drafts=drafts,
        keep_alives=keep_alives,
        block_size=block_size,
        cache_enabled=not no_cache,
        live_bytes=live_memory,
        kv_form=kv_form,
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
