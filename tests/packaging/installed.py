"""Run by check_wheel.py with the Python of a clean environment that has the wheel."""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import subprocess
import sys
from pathlib import Path


def check_names() -> None:
    """Only `kvport` is installed, and every module of it imports."""
    files = importlib.metadata.files("kvport")
    tops = {file.parts[0] for file in files if not file.parts[0].startswith("..")}
    assert all(t == "kvport" or t.endswith(".dist-info") for t in tops), tops
    for name in ("api", "snapshot", "manifest", "schemas", "tests"):
        assert importlib.util.find_spec(name) is None, name
    for file in files:
        if file.suffix == ".py" and file.parts[0] == "kvport":
            module = ".".join(file.with_suffix("").parts)
            if not module.endswith("__main__"):
                importlib.import_module(module.removesuffix(".__init__"))
    for part in ("manifest", "snapshot", "api"):
        assert (importlib.resources.files(f"kvport.{part}") / "py.typed").is_file()


def check_schemas(source: Path) -> None:
    """The schemas of the checkout are in the wheel, byte for byte."""
    installed = importlib.resources.files("kvport") / "schemas"
    for path in source.rglob("*.json"):
        found = installed.joinpath(*path.relative_to(source).parts)
        assert found.read_bytes() == path.read_bytes(), path
    served = importlib.import_module("kvport.api.schema_files").schemas()
    assert served == {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*.json")
    }


def check_command() -> None:
    """The command runs, and builds a model that it can check."""
    command = Path(sys.executable).parent / "kvport"
    version = importlib.metadata.version("kvport")
    out = subprocess.run([command, "--version"], check=True, capture_output=True)
    assert version in out.stdout.decode(), out
    subprocess.run([command, "models", "build", "llama", "tiny"], check=True)
    out = subprocess.run(
        [
            command, "selfcheck", "--model", "tiny", "--tokens", "600",
            "--chunk", "256", "--json",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    assert json.loads(out.stdout)["max_diff_to_hot"] == 0.0


if __name__ == "__main__":
    check_names()
    check_schemas(Path(sys.argv[1]))
    check_command()
    print("the wheel is whole")
