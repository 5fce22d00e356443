"""Export and import of 1 GB between two servers, against `cp` + fsync.

Times are medians of several rounds, and ratios are of these medians; memory is the
server's peak resident set above what it was before.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvport.api.client import Client
from kvport.api.demo.servers import ServerProcess, ended_in_order, starting_server
from kvport.snapshot.engine.builder import build_model
from kvport.snapshot.keyring import Keyring
from tests.bench.processes import MIB, peak_of

ROUNDS = 5
TOKENS = 1025
"""At a mebibyte of KV per token: 1 GiB is restored, one token is computed."""


def table(result: dict) -> list[tuple[str, str]]:
    """Label and figure, for people."""
    rows = [("artifact", f"{result['artifact_mib']:,.0f} MiB")]
    rows.append(("cp + fsync", f"{result['cp_fsync_s']:.2f} s"))
    for what in ("export", "import"):
        ratio = f"{result[f'{what}_to_cp']:.1f} x cp + fsync"
        rows.append((what, f"{result[f'{what}_s']:.2f} s, {ratio}"))
    for what in ("export", "import"):
        above = result[f"{what}_rss_above_idle_mib"]
        rows.append((f"{what}: memory above idle", f"{above:.1f} MiB"))
    return rows


def main() -> dict:
    with (
        ended_in_order(),
        tempfile.TemporaryDirectory(dir=os.environ.get("KVPORT_BENCH_DIR")) as name,
    ):
        rounds = _rounds(Path(name))
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    # Of the medians, so that the table's figures agree with each other.
    ratios = {
        f"{what}_to_cp": medians[f"{what}_s"] / medians["cp_fsync_s"]
        for what in ("export", "import")
    }
    return {"benchmark": "transfer", "rounds": ROUNDS, **medians, **ratios}


def _rounds(work: Path) -> list[dict]:
    build_model("llama", work / "llama", kv_bytes_per_token=MIB)
    prompt = np.random.default_rng(0).integers(1, 300, TOKENS).tolist()
    rounds = []
    with (
        _server(work / "a", work / "llama") as a,
        Client.for_home(work / "a") as source,
    ):
        source.complete("llama", tokens=prompt, max_tokens=1)
        for index in range(ROUNDS):
            home = work / f"b{index}"
            _trust(home, work / "a")
            with (
                _server(home, work / "llama") as b,
                Client.for_home(home) as target,
            ):
                rounds.append(_round(work, prompt, (a.pid, source), (b.pid, target)))
            shutil.rmtree(home)
    return rounds


@contextlib.contextmanager
def _server(home: Path, model: Path) -> Iterator[ServerProcess]:
    with starting_server(home, [str(model)]) as server:
        server.await_ready()
        yield server


def _trust(home: Path, other: Path) -> None:
    from kvport.manifest.trust import TrustEntry

    keyring = Keyring(home)
    keyring.create()
    public = Keyring(other).signing_key().public
    keyring.add(TrustEntry(public_key=public, name="a"))


def _round(work, prompt, origin, other) -> dict:
    (pid_a, source), (pid_b, target) = origin, other
    file, copy = work / "talk.kvport", work / "copy"
    os.sync()  # each step begins with nothing left to be written by another
    with peak_of(pid_a) as exporting:
        began = time.perf_counter()
        source.export("llama", file, tokens=prompt)
        _fsync(file)
        export_s = time.perf_counter() - began
    os.sync()
    began = time.perf_counter()
    subprocess.run(["cp", file, copy], check=True)
    _fsync(copy)
    copy_s = time.perf_counter() - began
    copy.unlink()
    os.sync()
    with peak_of(pid_b) as importing:
        began = time.perf_counter()
        result = target.import_(file)
        import_s = time.perf_counter() - began
    if result.restored_tokens < len(prompt) - 1:
        raise SystemExit(f"restored {result.restored_tokens} tokens only")
    size = file.stat().st_size
    file.unlink()
    return {
        "artifact_mib": size / MIB,
        "cp_fsync_s": copy_s,
        "export_s": export_s,
        "import_s": import_s,
        "export_rss_above_idle_mib": exporting.above_idle / MIB,
        "import_rss_above_idle_mib": importing.above_idle / MIB,
    }


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
