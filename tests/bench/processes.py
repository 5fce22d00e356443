"""Memory of another process: its resident set, and the peak of it within a span."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs

MIB = 1 << 20


@attrs.define
class Peak:
    """Resident bytes before a span, and the most within it."""

    before: int = 0
    peak: int = 0

    @property
    def above_idle(self) -> int:
        return self.peak - self.before


@contextlib.contextmanager
def peak_of(pid: int) -> Iterator[Peak]:
    """Watch a process's resident set until the block ends."""
    found = Peak()
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the kernel's mark
        found.before = _field(status, "VmRSS")
        yield found
        found.peak = _field(status, "VmHWM")
        return
    found.before = found.peak = _sampled(pid)  # macOS has no such mark
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            found.peak = max(found.peak, _sampled(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _field(status: Path, name: str) -> int:
    line = next(x for x in status.read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def _sampled(pid: int) -> int:
    out = subprocess.run(
        ["/bin/ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True
    )
    return int(out.stdout) * 1024
