"""A process ends in order after an engine, also where threads end late or hang."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvport.snapshot.engine.thread_end import shut_down
from tests.crash.shim import build, linux_only

_ENGINE = """
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.tuning import Tuning
import mlx.core as mx

engine = Engine(Tuning())
engine.call(lambda: mx.eval(mx.ones(4) + 1))
engine.close()
"""
_COMMAND = """
import threading
import mlx.core
from kvport.api.cli import main

threading.Thread(target=threading.Event().wait).start()
main()
"""


@linux_only
def test_an_end_of_the_interpreter_awaits_what_mlx_does_at_the_engines(tmp_path):
    shim = build(tmp_path, Path(__file__).with_name("late_ends.c"))
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_ends_though_a_thread_hangs(tmp_path):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        home = ("--home", str(tmp_path / "home"))
        return subprocess.run(
            [sys.executable, "-c", _COMMAND, *args, *home],
            capture_output=True,
            timeout=60,
            text=True,
            check=False,
        )

    done = run("keys", "init", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("}\n")
    assert run("cache", "stats").returncode == 1
    assert run("keys", "nothing").returncode == 2


def test_workers_that_hang_are_not_awaited_for_ever():
    workers, let_go = ThreadPoolExecutor(1), threading.Event()
    workers.submit(let_go.wait)
    assert not shut_down(workers, 0.1)
    let_go.set()
    assert shut_down(workers)
