"""Strange artifacts get an error of ours, soon, for little memory."""

import base64
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from kvport.manifest.domains import PayloadType
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    KvportError,
    LimitExceededError,
)
from kvport.manifest.limits import ENVELOPE_BYTES, MIB
from kvport.manifest.verify import open_artifact
from tests.manifest.builder import DENSE, KEY, NOW, OTHER_KEY, ManifestBuilder

ROOT = Path(__file__).parents[2]


def fuzz(seconds: int) -> None:
    paths = [str(ROOT / part) for part in ("manifest", "snapshot", "api", ".")]
    out = subprocess.run(
        [sys.executable, "-m", "tests.vectors.fuzzing", str(seconds)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
    ).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["inputs"] >= 20 * seconds
    assert found["above_idle"] <= 100 * MIB
    assert found["slowest"] < 1.0


def test_fuzzed_for_seconds():
    fuzz(3)


@pytest.mark.soak
def test_fuzzed_for_ten_minutes():
    fuzz(600)


def unsigned(size: int) -> bytes:
    """An envelope of this many bytes, by a key that nobody trusts."""
    tail = b'","payloadType":"%b","signatures":[{"keyid":"%b","sig":"%b"}]}' % (
        PayloadType.MANIFEST.encode(),
        KEY.public.key_id.encode(),
        base64.b64encode(bytes(64)),
    )
    head = b'{"payload":"'
    letters = size - len(head) - len(tail)
    return head + b"W" * (letters // 4 * 4) + tail


@pytest.mark.parametrize("key", [KEY, OTHER_KEY], ids=["forged", "unknown"])
def test_nothing_large_is_allocated_before_the_signature_holds(key):
    """The payload's bytes, and what its base64 is compared with: no more.

    They are an eighth of what a decoded payload takes, and are freed at the refusal.
    """
    envelope = unsigned(ENVELOPE_BYTES)
    trust = ManifestBuilder(key=key).trust()
    tracemalloc.start()
    try:
        with pytest.raises(KvportError):
            open_artifact(envelope, trust=trust, now=NOW, own_key=None)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.6 * ENVELOPE_BYTES
    assert left < MIB


def manifest_of(caches: int, row_counts: int) -> bytes:
    """An envelope: caches of 64 tensors each, segments of 1, 2, 3, ... rows."""
    builder = ManifestBuilder(layout=DENSE, points={}, cuts=(), block_size=8192)
    value = builder.payload()
    leaves = [{"dtype": "U8", "name": f"k{n}", "shape": [-1]} for n in range(64)]
    value["identity"]["layout"] = [
        {"cache": str(n), "class": "full", "kind": "kv", "leaves": leaves}
        for n in range(caches)
    ]
    [first], value["segments"], end = value["segments"], [], 0
    for rows in range(1, row_counts + 1):
        value["segments"].append({**first, "start": end, "end": end + rows})
        end += rows
    value["prefix"].update(tokens=end, size=4 * end)
    return builder.signed(value)


def test_a_short_manifest_cannot_ask_for_much_work():
    """Of 2^12 tensors in 2^6 + 1 sizes no header is made: all of them were 20 MB."""
    builder = ManifestBuilder()
    with pytest.raises(ArithmeticMismatchError):
        builder.verified(manifest_of(64, 64), local=None)
    envelope = manifest_of(64, 65)
    assert len(envelope) < MIB
    began = time.perf_counter()
    with pytest.raises(LimitExceededError):
        builder.verified(envelope, local=None)
    assert time.perf_counter() - began < 1
