"""The command line in this process, and homes to run it on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from kvport.api.cli.commands import root
from kvport.api.demo.servers import starting_server


@attrs.frozen
class Cli:
    """Runs `kvport` on one home."""

    home: Path

    def run(self, *args: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(
            root, list(args), input=stdin, env={"KVPORT_HOME": str(self.home)}
        )

    def json(self, *args: str, stdin: bytes | None = None) -> Any:
        """The one line that a command prints with --json, which must succeed."""
        result = self.run(*args, "--json", stdin=stdin)
        assert result.exit_code == 0, result.output
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    def refusal(self, *args: str, stdin: bytes | None = None) -> str:
        """The code of a refusal, which is the same with --json and without."""
        result = self.run(*args, "--json", stdin=stdin)
        assert result.exit_code == 1, result.output
        problem = json.loads(result.stdout)
        assert problem["advice"]
        assert result.stderr == ""

        plain = self.run(*args, stdin=stdin)
        assert plain.exit_code == 1
        assert plain.stdout == ""
        assert plain.stderr.startswith(f"error[{problem['code']}]: ")
        assert problem["advice"] in plain.stderr
        return problem["code"]


@pytest.fixture
def cli(tmp_path) -> Cli:
    return Cli(tmp_path / "home")


@pytest.fixture(scope="session")
def server(tmp_path_factory, model_dir) -> Iterator[Cli]:
    """A command line on the home of a running server with one model, `llama`."""
    home = tmp_path_factory.mktemp("server") / "home"
    with starting_server(home, [str(model_dir("llama"))], "--cap", "256MiB") as process:
        process.await_ready()
        yield Cli(home)


@pytest.fixture(scope="session")
def other_server(tmp_path_factory, model_dir) -> Iterator[Cli]:
    """The same for another server, which has the model under two names."""
    home = tmp_path_factory.mktemp("other") / "home"
    directory = model_dir("llama")
    models = [f"{name}={directory}" for name in ("first", "second")]
    with starting_server(home, models, "--cap", "256MiB") as process:
        process.await_ready()
        yield Cli(home)
