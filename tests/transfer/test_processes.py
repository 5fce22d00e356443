"""Killed in the middle of admission; and memory that does not grow with size."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvport.manifest.limits import MIB
from tests.transfer.world import TOKENS, Home, dump

CHECKOUT = Path(__file__).parents[2]


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.transfer.child", *map(str, arguments)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("step", "admitted"),
    [
        ("before-flush", False),
        ("before-commit", False),
        ("in-commit", False),
        ("after-commit", True),
    ],
)
def test_killed_at_a_step_of_admission(origin, home, tmp_path, step, admitted):
    file = tmp_path / "artifact.kvport"
    file.write_bytes(origin.export())
    first = Home(tmp_path / "b")
    first.trusted.append(origin.key)
    first.take(origin.export(TOKENS[:10]))  # another artifact, with some of the path
    before = first.state()
    first.close()

    seed = origin.key.to_bytes().hex()
    done = child("import-and-die", first.directory, file, seed, step)
    assert done.returncode == -signal.SIGKILL, done.stderr

    b = home("b")
    b.trusted.append(origin.key)
    if admitted:
        assert b.match().position == 11
        assert len(b.ledger.artifacts()) == 2
    else:
        after = b.state()
        assert {k: after[k] for k in ("files", "index", "ledger")} == {
            k: before[k] for k in ("files", "index", "ledger")
        }
    # Settled: nothing is left to be asked again.
    assert {row["status"] for row in dump(b.ledger)["artifact"]} == {"admitted"}
    result = b.take(file.read_bytes())
    assert result.restored_tokens == 11
    assert (result.admitted_segments == 0) is admitted


@pytest.mark.parametrize("compress", ["", "compress"])
def test_peak_memory_does_not_grow_with_the_artifact(tmp_path, compress):
    file, small, count = tmp_path / "large.kvport", tmp_path / "small.kvport", 100
    seed = Home(tmp_path / "a")
    key = seed.key.to_bytes().hex()
    seed.close()
    variant = "smooth" if compress else ""
    assert child("fill", tmp_path / "a", count, variant).returncode == 0
    done = child("measure-export", tmp_path / "a", file, small, count, compress)
    assert 0 < int(done.stdout) < 64 * MIB, done.stderr
    assert (file.stat().st_size > 200 * MIB) is not bool(compress)
    done = child("measure-import", tmp_path / "b", file, small, key, count)
    assert 0 < int(done.stdout) < 64 * MIB, done.stderr


def test_archives_are_read_without_mlx_or_a_database():
    code = "import sys, kvport.snapshot.transfer.archive; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert {"mlx", "mlx.core", "sqlite3"}.isdisjoint(done.stdout.split())
