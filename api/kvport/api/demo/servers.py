"""Server processes of our own: started, awaited, and ended in any case."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from kvport.api.errors import UnreachableError

_START_SECONDS: Final = 120
_STOP_SECONDS: Final = 15
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class ServerProcess:
    """A server that was started, and may not be ready yet."""

    def __init__(
        self, process: subprocess.Popen[bytes], out: IO[bytes], alive: IO[bytes]
    ) -> None:
        """A process with its standard output, and its input, which ends with us."""
        self.pid: Final = process.pid
        self._process = process
        self._out = out
        self._alive = alive

    def await_ready(self) -> str:
        """Wait until it answers; its address.

        Raises:
            UnreachableError: it did not start, and why.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            ready = selector.select(_START_SECONDS)
        # It writes one line in one piece: where it serves, or why it does not.
        line = self._out.readline() if ready else b""
        facts: dict[str, Any] = json.loads(line or b"{}")
        if "url" not in facts:
            reason = facts.get("detail", "its log may say why")
            raise UnreachableError(f"a server did not start: {reason}")
        return str(facts["url"])

    def end(self) -> None:
        """End it, by force if it takes long."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._alive.close()


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and a closed terminal end what the block began, as Ctrl-C does."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # What is ignored, as under nohup, stays so.
    heard = [one for one in _ENDING if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, stop) for one in heard}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def starting_server(
    home: Path, models: Sequence[str], *options: str
) -> Iterator[ServerProcess]:
    """A server on a free port of loopback, ended with the block.

    The command line and the client find it through its home, in which `server.log` is
    its log.

    Args:
        home: its home, which need not exist.
        models: as `kvport serve --model` takes them.
        options: further options of `kvport serve`.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "kvport.api", "serve", "--json", "--exit-with-stdin"),
        *("--home", str(home), "--port", "0", "--free-floor", "0"),
        *(part for model in models for part in ("--model", model)),
        *options,
    ]
    # Compiled kernels take the CPU's compiler seconds per model, and save less here.
    environment = {"MLX_DISABLE_COMPILE": "1", **os.environ}
    with contextlib.ExitStack() as cleanup:
        with (home / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                # Nothing is ever written: it ends with us, however we end.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        if process.stdout is None or process.stdin is None:
            raise TypeError("the process has no pipe, though it was asked for")
        server = ServerProcess(process, process.stdout, process.stdin)
        cleanup.callback(server.end)
        yield server
