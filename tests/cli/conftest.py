"""The command line in this process, and homes to run it on."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from kvport.api.cli import main


@attrs.frozen
class Cli:
    """Runs `kvport` on one home."""

    home: Path

    def run(self, *args: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(
            main, list(args), input=stdin, env={"KVPORT_HOME": str(self.home)}
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
