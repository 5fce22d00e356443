"""The command line `kvport`.

* Exit codes: 0 done; 1 refused or failed, with a code and advice; 2 wrong usage; 130
  after Ctrl-C.
* Results go to standard output, everything else to standard error. With `--json`
  standard output holds one line of JSON and nothing else, errors included.
* `-` stands for standard input or output.

Importing this is fast: mlx, the web framework and the client are imported by the
commands that need them, and everything else by `main`, where Ctrl-C is awaited.
"""

import importlib
import sys
from typing import Any, Final

INTERRUPTED: Final = 130
"""What shells report for a process that Ctrl-C ended."""


def main(**settings: Any) -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        importlib.import_module("kvport.api.cli.commands").root(**settings)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
