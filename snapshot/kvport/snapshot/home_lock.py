"""The locks of a home: one process owns it, one command at a time changes its keys.

In: a home. Out: a descriptor that owns it until it is closed, or a block in which no
other command changes what a running server reads.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvport.snapshot.errors import HomeInUseError

_PATIENCE: Final = (0.05, 0.1, 0.2, 0.4, None)
"""Seconds between attempts: clients hold the lock for an instant when they look."""


def lock(home: Path) -> int:
    """Own a home, which exists.

    Raises:
        HomeInUseError: another process runs on it.
        OSError: the lock's file cannot be opened.
    """
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for patience in _PATIENCE:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if patience is None:
                os.close(descriptor)
                raise HomeInUseError("another process runs on this home") from error
            time.sleep(patience)
        else:
            break
    return descriptor


@contextlib.contextmanager
def changing(home: Path) -> Iterator[None]:
    """Wait for other commands that change a home, which exists; a server need not stop.

    Raises:
        OSError: the home cannot be opened.
    """
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
