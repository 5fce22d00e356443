"""The lock of a home: one process owns it, the server or a command that changes it.

In: a home. Out: a descriptor that holds the lock until it is closed.
"""

import fcntl
import os
import time
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
