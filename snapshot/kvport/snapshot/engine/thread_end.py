"""The end of threads, so that the process can end after them in order.

In: threads that have nothing more to do. Out: they are gone, to the operating system
too, or do not get on.

A thread that has used mlx frees what mlx keeps for it when Python counts it as ended
already, and takes the interpreter's lock for that. An interpreter that ends meanwhile
ends that thread in a way that C++ answers with an abort of the process.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_PATIENCE: Final = 5.0
_TICK: Final = 0.001
_HANGING: Final = 30.0


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended, with all that C++ does at its end.

    Only Linux says when that is. Python joins in truth from 3.13 on, and macOS ends
    such threads without an abort.
    """
    thread.join()
    if sys.platform != "linux":
        return
    task = Path(f"/proc/self/task/{thread.native_id}")
    # Its number may be another thread's by now: not for ever.
    deadline = time.monotonic() + _PATIENCE
    while task.exists() and time.monotonic() < deadline:
        time.sleep(_TICK)


def shut_down(workers: ThreadPoolExecutor, seconds: float = _HANGING) -> bool:
    """Wait for what workers do, but not for ever: they may read from a hanging volume.

    Returns:
        Whether they have ended.
    """
    ending = threading.Thread(target=workers.shutdown, daemon=True)
    ending.start()
    ending.join(seconds)
    return not ending.is_alive()
