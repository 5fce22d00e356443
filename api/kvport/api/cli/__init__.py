"""The command line `kvport`.

* Exit codes: 0 done; 1 refused or failed, with a code and advice; 2 wrong usage; 130
  after Ctrl-C.
* Results go to standard output, everything else to standard error. With `--json`
  standard output holds one line of JSON and nothing else, errors included.
* `-` stands for standard input or output.

Importing this is fast: mlx, the web framework and the client are imported by the
commands that need them, and everything else by `main`, where Ctrl-C is awaited.
"""

import contextlib
import importlib
import os
import sys
from typing import Any, Final

INTERRUPTED: Final = 130
"""What shells report for a process that Ctrl-C ended."""


def main(**settings: Any) -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        importlib.import_module("kvport.api.cli.commands").root(**settings)
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if "mlx.core" in sys.modules and not isinstance(code, str):
        _leave(code or 0)
    sys.exit(code)


def _leave(code: int) -> None:
    """End the process without the interpreter's own end.

    What is to be kept was closed before. The interpreter would wait for threads that
    hang with a volume, and end others within mlx, which aborts.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
