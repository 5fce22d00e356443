"""A server as a process of its own, so that it can be watched and killed."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def running_server(
    home: Path, *models: Path, options: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`kvport serve` on a free port, ready; found through its home."""
    command = [
        *(sys.executable, "-m", "kvport.api", "serve", "--json"),
        *("--home", str(home), "--port", "0", "--free-floor", "0", *options),
        *(part for model in models for part in ("--model", str(model))),
    ]
    home.mkdir(mode=0o700, exist_ok=True)
    with (
        (home / "server.log").open("ab") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            ready = json.loads(process.stdout.readline() or b"{}")
            assert "url" in ready, (home / "server.log").read_text()
            yield process
        finally:
            process.terminate()
            process.wait(60)
