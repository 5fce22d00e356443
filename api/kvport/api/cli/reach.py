"""The cache that an operator's command is for: a server's, or the home's own.

A command that finds its home without an owner takes it, and opens the cache itself; it
talks to the owner otherwise.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import rich_click as click

from kvport.api.admin_client import Administered
from kvport.api.administration import Here
from kvport.api.cli.connect import connected
from kvport.api.cli.errors import NoHomeError, naming
from kvport.api.cli.logs import log_to_stderr
from kvport.api.cli.options import Server, server_options
from kvport.api.errors import NoServerError
from kvport.api.problems import ProblemError
from kvport.api.run_file import is_locked
from kvport.snapshot.errors import (
    CacheAbsentError,
    CacheInUseError,
    DiskFullError,
    ForeignRootError,
    HomeInUseError,
    MissingRootError,
    StorageError,
)
from kvport.snapshot.known_roots import KnownRoots
from kvport.snapshot.offline import opened


@attrs.frozen
class Place:
    """Where the cache is.

    Attributes:
        server: that it may belong to.
        cache_dir: its directory, if no server runs and the home has had several.
    """

    server: Server
    cache_dir: Path | None


def place_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the server's options and `--cache-dir`, as one parameter `place`."""

    @functools.wraps(command)
    def with_place(*, server: Server, cache_dir: Path | None, **rest: object) -> None:
        if cache_dir is not None and server.url is not None:
            raise click.UsageError("--cache-dir is for a home without a server.")
        command(place=Place(server, cache_dir), **rest)

    option = click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="The cache's directory, where no server runs; the home's own unless"
        " given.",
    )
    return option(server_options(with_place))


@contextlib.contextmanager
def reached(place: Place, *, starting: bool = False) -> Iterator[Administered]:
    """The cache, through its server or opened here.

    Args:
        place: where it is.
        starting: see `offline.opened`.

    Raises:
        NoHomeError: there is no home, nor a server elsewhere.
        KvportError: as of `connected` and `offline.opened`.
    """
    with contextlib.ExitStack() as undo, _naming_root(place):
        yield _reached(place, undo, starting=starting)


@contextlib.contextmanager
def _naming_root(place: Place) -> Iterator[None]:
    """Name the cache directory that a server of this home misses."""
    try:
        yield
    except ProblemError as error:
        root = KnownRoots(place.server.home).served
        if place.server.url or root is None or error.code != CacheAbsentError.code:
            raise
        with naming(root):
            raise


def _reached(
    place: Place, undo: contextlib.ExitStack, *, starting: bool
) -> Administered:
    if (here := _owned(place, undo, starting=starting)) is not None:
        return here
    if place.cache_dir is not None:
        raise click.UsageError("--cache-dir is for a home without a server.")
    try:
        return undo.enter_context(connected(place.server)).admin
    except NoServerError as error:
        # The owner was another command; or it is one still, and takes long.
        if (here := _owned(place, undo, starting=starting)) is not None:
            return here
        with naming(place.server.home):
            raise HomeInUseError("another command runs on this home") from error


def _owned(
    place: Place, undo: contextlib.ExitStack, *, starting: bool
) -> Administered | None:
    """The cache, opened here; None if it is a server's."""
    home = place.server.home
    if place.server.url is not None or is_locked(home):
        return None
    if not home.is_dir():
        raise NoHomeError(f"the home {home} does not exist")
    with naming(place.cache_dir or home):
        root = KnownRoots(home).to_open(place.cache_dir)
    # What people are to know of it is in what the command says.
    log_to_stderr(logging.ERROR)
    try:
        orders = undo.enter_context(opened(home, root, starting=starting))
    except HomeInUseError:
        return None  # A server, or another command, came first.
    except (
        CacheInUseError,
        DiskFullError,
        ForeignRootError,
        MissingRootError,
        StorageError,
    ):
        with naming(root):
            raise
    return Here(orders)
