"""Processes of their own for tests: one is killed, one has its memory measured.

Run from the checkout's root: `python -m tests.transfer.child COMMAND ARGUMENT...`.
"""

import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import CacheKind, CacheLayout, LeafSpec, StateLayout
from kvport.manifest.limits import GIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.index import Index
from kvport.snapshot.transfer.staging import Staging
from tests.transfer.world import Home

WIDE = StateLayout(
    (CacheLayout("0", CacheKind.KV, None, (LeafSpec("k", "F32", (1, 8, -1, 128)),)),)
)
WIDE_BLOCK = 512  # tokens of 4 KiB: blobs of 2 MiB
SMALL = [1, *range(WIDE_BLOCK - 1)]
PIECE = 1 << 16
"""Bytes that an HTTP server hands over at once."""

_STEPS: dict[str, tuple[type, str, bool]] = {
    "before-flush": (Staging, "flush", False),
    "before-commit": (Cache, "admit", False),
    "in-commit": (Index, "add_node", True),
    "after-commit": (Cache, "admit", True),
}
"""Where to die: a method, and whether after it."""


def die_at(step: str) -> None:
    """Make the process kill itself at a step of admission."""
    owner, name, after = _STEPS[step]
    real: Callable[..., Any] = getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)


def import_and_die(directory: str, file: str, seed: str, step: str) -> None:
    home = Home(Path(directory))
    home.trusted.append(SigningKey.from_bytes(bytes.fromhex(seed)))
    die_at(step)
    home.take(Path(file).read_bytes())


def wide_home(directory: Path) -> Home:
    return Home(directory, layout=WIDE, block_size=WIDE_BLOCK, cap=GIB)


def fill(directory: str, count: str, variant: str) -> None:
    """Store a prefix of `count` blobs of 2 MiB, and a small one."""
    home, tip = wide_home(Path(directory)), ROOT_NODE
    home.store(SMALL, [WIDE_BLOCK], kinds={}, variant=variant)
    tokens = wide_tokens(count)
    for start in range(0, len(tokens), WIDE_BLOCK):
        end = start + WIDE_BLOCK
        tip = home.store(tokens, [end], start=start, kinds={}, tip=tip, variant=variant)
    home.close()


def measure_export(
    directory: str, file: str, small: str, count: str, compress: str = ""
) -> None:
    """Write artifacts of both prefixes; print how the large one raised the peak."""
    home = wide_home(Path(directory))
    # What is loaded once, with the first artifact, is no peak.
    how = {"compress": bool(compress)}
    Path(small).write_bytes(home.export(SMALL, **how))
    before = peak()
    with Path(file).open("wb") as out:
        out.writelines(home.open_export(wide_tokens(count), **how).stream())
    print(peak() - before)
    home.close()


def measure_import(
    directory: str, file: str, small: str, seed: str, count: str
) -> None:
    """Import both; print how the large one raised the peak."""
    home = wide_home(Path(directory))
    home.trusted.append(SigningKey.from_bytes(bytes.fromhex(seed)))
    home.take(Path(small).read_bytes(), step=PIECE)
    before = peak()
    running = home.start_import()
    with Path(file).open("rb") as source:
        while piece := source.read(PIECE):
            running.feed(piece)
    assert running.finish().restored_tokens == len(wide_tokens(count))
    print(peak() - before)
    home.close()


def wide_tokens(count: str) -> list[int]:
    return list(range(int(count) * WIDE_BLOCK))


def peak() -> int:
    """Peak resident bytes so far."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux's ru_maxrss counts what the parent was when it forked.
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


COMMANDS: dict[str, Callable[..., None]] = {
    "import-and-die": import_and_die,
    "fill": fill,
    "measure-export": measure_export,
    "measure-import": measure_import,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
