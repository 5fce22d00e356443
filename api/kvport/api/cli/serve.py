"""`kvport serve`: a node, its models, and its HTTP server, until a signal."""

import logging
import sys
from pathlib import Path
from typing import Final

import rich_click as click
import structlog

from kvport.api.cli.options import POLICY, Size, home_option
from kvport.api.cli.output import json_option, print_json
from kvport.api.server import serve as serve_node
from kvport.manifest.limits import BLOCK_TOKENS
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.runner import Tuning
from kvport.snapshot.node import Node, NodeSettings

_DEFAULTS: Final = Tuning()
_PORT: Final = 8470
_AUTO: Final = "auto"


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
    default=_DEFAULTS.chunk,
    show_default=True,
    help="Tokens that prefill evaluates at once; a multiple of the block size.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=_DEFAULTS.stride,
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
@json_option
def serve(
    *,
    models: tuple[str, ...],
    home: Path,
    cache_dir: Path | None,
    cap: str,
    host: str,
    port: int,
    policy: str,
    chunk: int,
    stride: int,
    block_size: int,
    no_cache: bool,
    live_memory: int | None,
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
    settings = NodeSettings(
        home=home,
        cache_root=cache_dir,
        cap_bytes=None if cap == _AUTO else Size().convert(cap, None, None),
        block_size=block_size,
        policy=Policy(policy),
        tuning=Tuning(chunk=chunk, stride=stride, live_bytes=live_memory),
        cache_enabled=not no_cache,
    )
    sources = [_named(model) for model in models]
    _log_to_stderr()
    node = Node.open(settings)
    try:
        for name, source in sources:
            node.load_model(source, name)
    except BaseException:
        node.close()
        raise
    names = list(node.engine.models)

    def ready(url: str) -> None:
        key_file = home / "keys" / "api.key"
        if as_json:
            facts = {"url": url, "home": str(home), "key_file": str(key_file)}
            print_json(facts | {"models": names})
        else:
            click.echo(
                f"kvport serves {', '.join(names)} at {url}"
                f" (home {home}, API key in {key_file})"
            )

    serve_node(node, host=host, port=port, ready=ready)


def _named(model: str) -> tuple[str | None, str]:
    """(name, source) of a `--model`; a directory may have `=` in its name."""
    name, equals, source = model.partition("=")
    if not equals or Path(model).is_dir():
        return None, model
    if not name or not source:
        raise click.BadParameter(f"{model!r} is not NAME=PATH", param_hint="--model")
    return name, source


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
