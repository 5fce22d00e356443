"""Export and import of 1 GB between two servers, against `cp` + fsync.

Time is a ratio to the copy in the same run, median of several; memory is the server's
peak resident set above what it was before.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvport.api.client import Client
from kvport.snapshot.engine.builder import build_model
from kvport.snapshot.keyring import Keyring
from tests.bench.processes import MIB, peak_of
from tests.server_process import running_server

ROUNDS = 3
TOKENS = 1025
"""At a mebibyte of KV per token: 1 GiB is restored, one token is computed."""


def main() -> dict:
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVPORT_BENCH_DIR")) as name:
        work = Path(name)
        build_model("llama", work / "llama", kv_bytes_per_token=MIB)
        prompt = np.random.default_rng(0).integers(1, 300, TOKENS).tolist()
        with (
            running_server(work / "a", work / "llama") as a,
            Client.for_home(work / "a") as source,
        ):
            source.complete("llama", tokens=prompt, max_tokens=1)
            rounds = []
            for index in range(ROUNDS):
                home = work / f"b{index}"
                _trust(home, work / "a")
                with (
                    running_server(home, work / "llama") as b,
                    Client.for_home(home) as target,
                ):
                    rounds.append(
                        _round(work, prompt, (a.pid, source), (b.pid, target))
                    )
                shutil.rmtree(home)
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {"benchmark": "transfer", "rounds": ROUNDS, **medians}


def _trust(home: Path, other: Path) -> None:
    from kvport.manifest.trust import TrustEntry

    keyring = Keyring(home)
    keyring.create()
    public = Keyring(other).signing_key().public
    keyring.add(TrustEntry(public_key=public, name="a"))


def _round(work, prompt, origin, other) -> dict:
    (pid_a, source), (pid_b, target) = origin, other
    file, copy = work / "talk.kvport", work / "copy"
    with peak_of(pid_a) as exporting:
        began = time.perf_counter()
        source.export("llama", file, tokens=prompt)
        _fsync(file)
        export_s = time.perf_counter() - began
    began = time.perf_counter()
    shutil.copyfile(file, copy)
    _fsync(copy)
    copy_s = time.perf_counter() - began
    copy.unlink()
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
        "export_to_cp": export_s / copy_s,
        "import_to_cp": import_s / copy_s,
        "export_rss_above_idle_mib": exporting.above_idle / MIB,
        "import_rss_above_idle_mib": importing.above_idle / MIB,
    }


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
