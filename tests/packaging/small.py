"""Run by check_wheel.py in an environment without mlx, litestar and zstandard."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, sys.argv[1])

from kvport.manifest.recipients import Recipient
from tests.manifest.builder import ManifestBuilder
from tests.manifest.sealed_builder import SealedBuilder

ABSENT = ("mlx", "mlx_lm", "numpy", "litestar", "httpx", "msgspec", "zstandard")


def kvport(*args: object) -> tuple[int, dict]:
    command = [Path(sys.executable).parent / "kvport", *map(str, args), "--json"]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.stdout, done
    return done.returncode, json.loads(done.stdout)


def main(work: Path) -> None:
    for name in ABSENT:
        assert importlib.util.find_spec(name) is None, name
    home, now = work / "home", datetime.now(UTC).replace(microsecond=0)
    builder = ManifestBuilder(created=now, expires=now + timedelta(days=1))
    plain = work / "plain.kvport"
    plain.write_bytes(builder.container(builder.signed()))
    kvport("keys", "init", "--home", home)
    assert kvport("verify", plain, "--home", home)[1]["code"] == "untrusted_key"

    key = builder.key.public.raw.hex()
    assert kvport("trust", "add", key, "--name", "a", "--yes", "--home", home)[0] == 0
    status, found = kvport("verify", plain, "--home", home)
    assert (status, found["tokens"]) == (0, len(builder.tokens))
    status, shown = kvport("inspect", plain, "--home", home)
    assert (status, shown["artifact_id"]) == (0, found["artifact_id"])
    assert shown["here"]["believed"]

    data = bytearray(plain.read_bytes())
    data[data.rindex(b"blobs/blake3/") + 512 + 10] ^= 1  # after the entry's header
    plain.write_bytes(data)
    status, refused = kvport("verify", plain, "--home", home)
    assert (status, refused["code"]) == (1, "tensor_header"), refused

    raw = kvport("keys", "recipient", "--home", home)[1]["public_key"]
    recipient = Recipient(bytes.fromhex(raw))
    sealed = work / "sealed.kvport"
    made = SealedBuilder(plain=builder, recipients=(recipient,))
    sealed.write_bytes(made.container())
    status, found = kvport("verify", sealed, "--home", home)
    assert (status, found["sealed"]) == (0, False), found
    print("files are inspected and verified without mlx")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
