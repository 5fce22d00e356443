"""The README's commands, pasted as they stand, and what it says that they print."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARYING = re.compile(r"[0-9a-f]{64}|(?:[0-9a-f]{4} ){7}[0-9a-f]{4}|[0-9.]+ KiB")


def blocks(section: str, kind: str) -> str:
    """All blocks of one kind in a section, one after the other."""
    _, _, rest = README.partition(f"\n## {section}\n")
    text, _, _ = rest.partition("\n## ")
    return "".join(found for tag, found in BLOCK.findall(text) if tag == kind)


def lines(text: str) -> list[str]:
    """Without what differs from run to run: keys, digests, sizes, the model's noise."""
    found = VARYING.sub("...", text).splitlines()
    noise = {
        found[at - 1]
        for at, line in enumerate(found)
        if line.endswith("tokens restored, 20 generated")
    }
    assert len(noise) == 1  # imported state continues as the origin does
    return ["noise" if line in noise else line for line in found]


@pytest.fixture
def ports() -> dict[str, str]:
    """Free ports for those of the README."""
    found = {}
    with socket.socket() as one, socket.socket() as two:
        for name, sock in (("8471", one), ("8472", two)):
            sock.bind(("127.0.0.1", 0))
            found[name] = str(sock.getsockname()[1])
    return found


def test_the_tour_prints_what_the_readme_says(tmp_path, ports):
    tour, agent = "A tour in 60 seconds", "How an agent uses it"
    script, _, cleanup = blocks(agent, "sh").partition("kill ")
    path, rest = blocks(tour, "sh").split("\n", 1)
    assert path == 'export PATH="$PWD/.venv/bin:$PATH"'
    (tmp_path / "agent.py").write_text(blocks(agent, "python"), "utf-8")
    commands = "\n".join(
        [
            "set -m",
            "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT",
            f'export PATH="{Path(sys.executable).parent}:$PATH"',
            rest,
            "echo === the agent >&2",
            "set -e",
            script,
            "python agent.py",
            f"kill {cleanup}",
            "wait",
        ]
    )
    for written, free in ports.items():
        commands = commands.replace(written, free)
    done = subprocess.run(
        ["bash"],
        input=commands, text=True, encoding="utf-8", cwd=tmp_path, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    printed = done.stdout
    for written, free in ports.items():
        printed = printed.replace(free, written)
    toured, _, by_agent = printed.partition("=== the agent\n")

    # Servers say that they are ready when they are.
    expected, real = lines(blocks(tour, "text")), lines(toured)
    said = [line for line in expected if line.startswith("kvport serves ")]
    assert {line for line in real if line in said} == set(said)
    assert [x for x in real if x not in said] == [x for x in expected if x not in said]

    assert done.returncode == 0, by_agent
    assert '"cached_tokens":4432' in by_agent
    assert '"restored_tokens":4432' in by_agent
    assert re.search(r"\d+ 44\d\d 44\d\d$", by_agent, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_blocks_can_be_pasted_into_zsh():
    for tag, block in BLOCK.findall(README):
        assert tag in {"sh", "text", "python"}
        if tag == "sh":
            for line in block.splitlines():
                assert not re.search(r"(^|\s)#", line), line
                assert not line.startswith("$"), line
