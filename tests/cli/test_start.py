"""What importing and asking for help cost, and that help does not promise too much."""

import json
import subprocess
import sys
import time

import rich_click as click

from kvport.api.cli.commands import root
from kvport.api.cli.tree import LazyCommand, LazyGroup

HEAVY = ("mlx", "mlx_lm", "litestar", "httpx", "uvicorn", "numpy")


def commands(group: LazyGroup, *path: str):
    for name, command in group.commands.items():
        if isinstance(command, LazyGroup):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def imported_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after the code, in a process of its own."""
    code += "\nimport json, sys"
    code += "\nprint(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_it_imports_nothing_heavy():
    assert not imported_by("import kvport.api.cli.commands").intersection(HEAVY)


def test_help_imports_nothing_heavy():
    code = "from kvport.api.cli.commands import root as main\n"
    code += "main(['--help'], standalone_mode=False)\n"
    code += "main(['models', '--help'], standalone_mode=False)"
    assert not imported_by(code).intersection(HEAVY)


def test_every_line_of_help_is_the_commands_own():
    found = dict(commands(root))
    assert len(found) > 15
    for path, command in found.items():
        assert isinstance(command, LazyCommand)
        own = command.load().get_short_help_str(limit=200)
        assert command.short_help == own, path


def test_every_command_takes_json_and_names_itself_right():
    for path, command in commands(root):
        loaded = command.load()
        assert loaded.name == path[-1]
        names = {option for param in loaded.params for option in param.opts}
        assert "--json" in names, path


def test_every_option_says_what_it_is_for():
    for path, command in commands(root):
        for param in command.load().params:
            if isinstance(param, click.Option):
                assert param.help, (path, param.name)


def test_it_runs_as_a_module():
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvport.api", "--version"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("kvport")
    assert time.perf_counter() - started < 10
