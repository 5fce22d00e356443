"""Server processes of our own: started, awaited, and ended in any case."""

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvport.api.errors import UnreachableError

_START_SECONDS: Final = 120
_STOP_SECONDS: Final = 15


@contextlib.contextmanager
def running_server(
    home: Path, models: Sequence[Path], *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A server on a free port of loopback, ready for requests.

    It is found through its home, as the command line finds it. Its log is
    `<home>/server.log`.

    Args:
        home: its home, which need not exist.
        models: directories of models.
        options: further options of `kvport serve`.

    Raises:
        UnreachableError: it did not start; the message ends with its last words.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "kvport.api", "serve", "--json"),
        *("--home", str(home), "--port", "0"),
        *(part for model in models for part in ("--model", str(model))),
        *options,
    ]
    # Compiled kernels take the CPU's compiler seconds per model, and save less here.
    environment = {"MLX_DISABLE_COMPILE": "1", **os.environ}
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        _await_ready(process, home / "server.log")
        yield process
    finally:
        _end(process)


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it says in one line where it serves; it says nothing else."""
    if process.stdout is None:
        raise TypeError("the process was started without a pipe")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        started = selector.select(_START_SECONDS) and process.stdout.readline()
    if not started:
        words = log.read_text("utf-8", "replace").strip()[-500:]
        raise UnreachableError(f"a server did not start: {words or 'no word of why'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
