"""The preloaded shim from Python: built, given orders, told notes.

Linux only. On macOS the same would be a library in DYLD_INSERT_LIBRARIES: not tried.
"""

import ctypes
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

linux_only = pytest.mark.skipif(
    sys.platform != "linux",
    reason="the file-system shim is preloaded, which was built for Linux only",
)

SOURCE = Path(__file__).with_name("shim.c")


def build(directory: Path, source: Path = SOURCE) -> Path:
    """Compile a shim; without a C compiler the matrix fails, it is not skipped."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.fail("the crash matrix needs a C compiler: cc, gcc or clang")
    library = directory / f"{source.stem}.so"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
         "-o", library, source, "-ldl", "-lpthread"],
        check=True,
    )  # fmt: skip
    return library


@functools.cache
def _loaded() -> ctypes.CDLL:
    """The shim in this process, which was started with it."""
    shim = ctypes.CDLL(None)
    shim.shim_steps.restype = ctypes.c_long
    return shim


def orders(**given: object) -> str:
    """Orders as the shim reads them; see shim.c for the words."""
    return " ".join(f"{key}={value}" for key, value in given.items())


def arm(text: str) -> None:
    """Begin to count at 0, with these orders."""
    _loaded().shim_arm(text.encode())


def steps() -> int:
    return int(_loaded().shim_steps())


def note(text: str) -> None:
    """Put a line into the log, between the operations before and after it."""
    _loaded().shim_note(text.encode())
