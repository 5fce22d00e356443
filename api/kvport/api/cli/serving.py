"""A server from its checked arguments to its end: what needs mlx and the framework."""

import contextlib
import logging

import rich_click as click

from kvport.api.cli.errors import naming
from kvport.api.cli.logs import log_to_stderr
from kvport.api.cli.output import print_json, say
from kvport.api.cli.per_model import ANY
from kvport.api.cli.starting import Claim, Start
from kvport.api.server import claim_socket
from kvport.api.server import serve as serve_node
from kvport.snapshot.engine.models import locate
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import (
    CacheInUseError,
    CapacityError,
    ForeignRootError,
    HomeInUseError,
    MissingRootError,
)
from kvport.snapshot.known_roots import KnownRoots
from kvport.snapshot.node import Node, NodeSettings


def run(start: Start, claim: Claim) -> None:
    """Serve until a signal.

    Everything that may be refused for the arguments' sake comes before the home is
    taken over: the port, and where the models are.

    Raises:
        KvportError: the arguments, the home, or a model are refused.
    """
    log_to_stderr(logging.INFO)
    listening = claim_socket(start.host, start.port)
    with contextlib.ExitStack() as undo:
        undo.callback(listening.close)
        located = [(locate(one.source)[1], one.name) for one in start.sources]
        claim.release()
        try:
            node = _opened(start)
        except (CacheInUseError, ForeignRootError, MissingRootError):
            claim.is_void = True
            raise
        except CapacityError:
            # A cache elsewhere was made with the home's key, which it needs again.
            claim.is_void = start.cache_root is None
            raise
        undo.callback(node.close)
        for directory, name in located:
            node.load_model(
                str(directory),
                name,
                _tuning(start, name),
                keep_alive=start.keep_alives[name],
            )
        undo.pop_all()
    serve_node(node, listening, ready=lambda url: _ready(start, node, url))


def _tuning(start: Start, name: str) -> Tuning:
    """The scheduler's settings, for one model."""
    points = start.points[name]
    return Tuning(
        chunk=start.chunk,
        live_bytes=start.live_bytes,
        kv_form=start.kv_form,
        stride=points.stride,
        retention=points.retention,
        draft=start.drafts[name],
    )


def _opened(start: Start) -> Node:
    with naming(start.home):
        root = KnownRoots(start.home).to_serve(start.cache_root)
    settings = NodeSettings(
        home=start.home,
        cache_root=root,
        cap_bytes=start.cap_bytes,
        free_floor=start.free_floor,
        block_size=start.block_size,
        policy=start.policy,
        tuning=_tuning(start, ANY),
        keep_alive=start.keep_alives[ANY],
        cache_enabled=start.cache_enabled,
    )
    try:
        return Node.open(settings)
    except HomeInUseError:
        with naming(start.home):
            raise
    except (CacheInUseError, ForeignRootError, MissingRootError):
        with naming(root):
            raise


def _ready(start: Start, node: Node, url: str) -> None:
    names = list(node.engine.models)
    what = ", ".join(names) or "no models yet"
    key_file = start.home / "keys" / "api.key"
    if start.as_json:
        facts = {"url": url, "home": str(start.home), "key_file": str(key_file)}
        print_json(facts | {"models": names})
    else:
        click.echo(
            f"kvport serves {what} at {url} (home {start.home}, API key in {key_file})"
        )
        if node.settings.cache_enabled and (reason := node.health().reason):
            state = node.health().state.value.replace("_", " ")
            say(f"the cache at {node.settings.cache_root} is {state}: {reason}")
