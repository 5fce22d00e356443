"""The server that a command talks to, and the model that it means."""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import rich_click as click

from kvport.api.cli.errors import (
    LocalFileError,
    ModelNotNamedError,
    NoModelError,
    NoServerHereError,
)
from kvport.api.cli.options import Server
from kvport.api.cli.output import stderr
from kvport.api.client import Client
from kvport.api.results import UnloadedModel
from kvport.api.run_file import is_locked, running

_KEY_VARIABLE: Final = "KVPORT_API_KEY"
_KEY: Final = re.compile(r"[!-~]+", re.ASCII)
_START_SECONDS: Final = 20
_CLAIM_SECONDS: Final = 3
"""In which a server that was started just now takes its home."""
_POLL_SECONDS: Final = 0.1
_HANDOVER_SECONDS: Final = 0.05
"""A server that starts frees its home for an instant, between claim and ownership."""


def connected(server: Server) -> Client:
    """A client of the server, which may just be starting.

    Raises:
        NoServerError: no server runs on the home, nor starts.
        LocalFileError: the file with the key cannot be used.
        KvportError: as of `Client.for_home`.
    """
    if server.url is None:
        _await_start(server.home)
        return Client.for_home(server.home)
    if (key := _given_key(server.key_file)) is not None:
        return Client(server.url, key)
    if not (server.home / "keys" / "api.key").exists():
        raise click.UsageError(
            f"--url needs the server's API key, which is in keys/api.key of its home:"
            f" set {_KEY_VARIABLE} to it, or name a file with it by --api-key-file."
        )
    return Client.for_home(server.home, server.url)


def chosen(client: Client, model: str | None) -> str:
    """The model that was named, or the only one there is.

    Raises:
        NoModelError: none was named, and the server has none.
        ModelNotNamedError: none was named, and the server has several.
    """
    if model is not None:
        return model
    names = [found.name for found in client.models()]
    if not names:
        gone = map(describe_unloaded, client.unloaded_models())
        raise NoModelError("; ".join(("the server has no model now", *gone)))
    if len(names) != 1:
        known = ", ".join(sorted(names))
        raise ModelNotNamedError(f"the server has {len(names)} models: {known}")
    return names[0]


def describe_unloaded(one: UnloadedModel) -> str:
    """What became of it, and how it comes back."""
    idle = ""
    if one.idle_seconds is not None:
        idle = f", after {one.idle_seconds:g} s without a request"
    load = shlex.join(["kvport", "models", "load", one.source, "--name", one.name])
    return f"{one.name} was unloaded at {one.unloaded}{idle}; `{load}` loads it again"


def _given_key(file: Path | None) -> str | None:
    """The key that was handed over, not the one in a home."""
    if file is None:
        origin, text = _KEY_VARIABLE, os.environ.get(_KEY_VARIABLE)
        if not text:
            return None
    else:
        origin = "standard input" if file == Path("-") else str(file)
        with click.open_file(os.fspath(file), encoding="utf-8", errors="replace") as f:
            text = f.read()
    if not _KEY.fullmatch(key := text.strip()):
        raise LocalFileError(f"{origin}: not an API key")
    return key


def _await_start(home: Path) -> None:
    if running(home) is not None:
        return
    began = time.monotonic()
    with _waiting():
        while (waited := time.monotonic() - began) < _START_SECONDS:
            if waited > _CLAIM_SECONDS and not _is_owned(home):
                break
            time.sleep(_POLL_SECONDS)
            if running(home) is not None:
                return
    start = shlex.join(["kvport", "serve", "--model", "DIR", "--home", str(home)])
    raise NoServerHereError(f"no server runs on the home {home}; start one: `{start}`")


def _is_owned(home: Path) -> bool:
    if is_locked(home):
        return True
    time.sleep(_HANDOVER_SECONDS)
    return is_locked(home)


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status("waiting for the server to start"):
        yield
