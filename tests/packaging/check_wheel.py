"""The built wheel, in a clean environment outside of the checkout.

sdist, then the wheel from that sdist (as an installer without a wheel would do), its
contents, an installation, and the tests in `tests/packaging` run on what was installed.
"""

import os
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


if __name__ == "__main__":
    main()
