"""The built wheel, in a clean environment outside of the checkout.

sdist, then the wheel from that sdist (as an installer without a wheel would do), its
contents, an installation, and the tests in `tests/packaging` run on what was installed.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    print("+", *command, flush=True)
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    subprocess.run([*map(str, command)], cwd=cwd, check=True, env=environment)


SMALL = (
    # The format's libraries, and what they need.
    "attrs", "blake3", "cffi", "cryptography", "pycparser",
    # The command line's.
    "click", "markdown-it-py", "mdurl", "platformdirs", "pygments", "rich",
    "rich-click", "structlog", "typing-extensions",
)  # fmt: skip


def check_small(work: Path, wheel: Path) -> None:
    """Files are inspected and verified without mlx and all the rest."""
    lock, entry = [], False
    for line in (ROOT / "requirements.lock").read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            entry = re.split(r"[=<>!;\[ ]", line)[0] in SMALL
        if entry:
            lock.append(line)
    (work / "small.lock").write_text("".join(lock))
    small = work / "small"
    venv.create(small, with_pip=True)
    python = small / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    run(*pip, "--require-hashes", "-r", work / "small.lock")
    run(*pip, "--no-deps", "--no-index", wheel)
    test = ROOT / "tests" / "packaging" / "small.py"
    run(python, "-I", test, ROOT, cwd=work)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        dist = work / "dist"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
        (wheel,) = dist.glob("*.whl")
        tools = Path(sys.executable).parent
        run(tools / "check-wheel-contents", wheel)
        # The locked dependencies are this environment's; kvport itself comes from the
        # wheel alone, since the checkout's editable entry is not on this path.
        clean = work / "venv"
        venv.create(clean, with_pip=True)
        python = clean / "bin" / "python"
        lock = ROOT / "requirements.lock"
        pip = [python, "-m", "pip", "install", "--quiet"]
        run(*pip, "--require-hashes", "-r", lock)
        run(*pip, "--no-deps", "--no-index", wheel)
        test = ROOT / "tests" / "packaging" / "installed.py"
        run(python, "-I", test, ROOT / "schemas", cwd=work)
        check_small(work, wheel)


if __name__ == "__main__":
    main()
