"""What checking costs: a long manifest, the keys of a long prompt, sealing.

* A manifest of 4,096 segments over 2^20 tokens, of a model of 32 layers, is verified
  from the envelope's bytes to the container's entries: target 150 ms.
* The keys of 128k tokens at every block's end: target 25 ms.
* One prefix is exported to a file and imported from it, plain and sealed in turn, by
  caches on disk in this process: the sealed way takes at most 1.6 times as long.

Times are medians; processor time is told beside, for machines that do other things.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import blob_digest
from kvport.manifest.envelope import sign_payload
from kvport.manifest.identity import Lineage, Provenance
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import GIB, MIB
from kvport.manifest.parts import Blob, Prefix, Segment
from kvport.manifest.tokens import encode_tokens, prefix_keys
from kvport.manifest.verify import verify
from tests.manifest.builder import KEY, NOW, NUMERICS, ManifestBuilder, identity_of
from tests.transfer.world import Home

ROUNDS = 5
REPEATS = 15
SEGMENTS = 4_096
BLOCK = 256
KEY_TOKENS = 128 * 1024

_LEAVES = (
    LeafSpec("k", "BF16", (1, 2, -1, 64)),
    LeafSpec("v", "BF16", (1, 2, -1, 64)),
)
MODEL = StateLayout(
    tuple(CacheLayout(str(n), CacheKind.KV, None, _LEAVES) for n in range(32))
)
_ROWS = (LeafSpec("k", "U8", (1, -1, MIB // 2)), LeafSpec("v", "U8", (1, -1, MIB // 2)))
HEAVY = StateLayout((CacheLayout("0", CacheKind.KV, None, _ROWS),))
"""A mebibyte per token."""
HEAVY_TOKENS, HEAVY_BLOCK = 256, 32


def table(result: dict) -> list[tuple[str, str]]:
    """Label and figure, for people."""
    return [
        (
            f"manifest of {SEGMENTS:,} segments, {result['envelope_mib']:.1f} MiB",
            _shown(result["manifest_ms"], result["manifest_cpu_ms"], 150),
        ),
        (
            f"keys of {KEY_TOKENS:,} tokens",
            _shown(result["keys_ms"], result["keys_cpu_ms"], 25),
        ),
        (
            f"plain: export and import of {result['artifact_mib']:.0f} MiB",
            f"{result['plain_s']:.2f} s, {result['plain_cpu_s']:.2f} computing",
        ),
        (
            "sealed: the same",
            f"{result['sealed_s']:.2f} s, {result['sealed_cpu_s']:.2f} computing",
        ),
        ("sealed to plain", f"{result['sealed_to_plain']:.2f} (target 1.6)"),
    ]


def _shown(passed: float, computed: float, target: int) -> str:
    return f"{passed:.1f} ms, {computed:.1f} computing (target {target})"


def main() -> dict:
    envelope = long_manifest()
    builder = ManifestBuilder()
    manifest_ms, manifest_cpu_ms = _median_ms(
        lambda: verify(
            envelope, trust=builder.trust(), now=NOW, local=None, own_key=None
        )
    )
    tokens = encode_tokens(range(KEY_TOKENS))
    ends = range(BLOCK, KEY_TOKENS + 1, BLOCK)
    keys_ms, keys_cpu_ms = _median_ms(
        lambda: prefix_keys(bytes(32), BLOCK, tokens, ends)
    )
    return {
        "benchmark": "verification",
        "rounds": ROUNDS,
        "envelope_mib": len(envelope) / MIB,
        "manifest_ms": manifest_ms,
        "manifest_cpu_ms": manifest_cpu_ms,
        "keys_ms": keys_ms,
        "keys_cpu_ms": keys_cpu_ms,
        **_sealing(),
    }


def _median_ms(act: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds that passed, and that were computed."""
    took, computed = [], []
    for _ in range(REPEATS):
        began, before = time.perf_counter(), time.process_time()
        act()
        took.append(time.perf_counter() - began)
        computed.append(time.process_time() - before)
    return 1e3 * statistics.median(took), 1e3 * statistics.median(computed)


def long_manifest() -> bytes:
    """The envelope of a manifest with many segments, all of which adds up."""
    identity = identity_of(MODEL)
    ends = range(BLOCK, SEGMENTS * BLOCK + 1, BLOCK)
    tokens = encode_tokens(range(SEGMENTS * BLOCK))
    layout: BlobLayout = MODEL.blob(BlobClass.KV, BLOCK)
    origins = frozenset({KEY.public.key_id})
    said = [Provenance(lineage, NUMERICS, origins) for lineage in Lineage]
    segments = tuple(
        Segment(
            end - BLOCK,
            end,
            key,
            said[end > SEGMENTS * BLOCK // 2],
            (Blob(BlobClass.KV, blob_digest(key), layout.size),),
        )
        for end, key in zip(
            ends, prefix_keys(identity.digest, BLOCK, tokens, ends), strict=True
        )
    )
    manifest = attrs.evolve(
        ManifestBuilder().manifest(),
        block_size=BLOCK,
        identity=identity,
        prefix=Prefix(
            SEGMENTS * BLOCK, segments[-1].key, blob_digest(tokens), len(tokens)
        ),
        segments=segments,
        points=(),
    )
    return sign_payload(canonical_dumps(manifest.to_json()), [KEY])


def _sealing() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(
        dir=os.environ.get("KVPORT_BENCH_DIR"), prefix="kvport-sealing-"
    ) as name:
        work = Path(name)
        options = {"layout": HEAVY, "block_size": HEAVY_BLOCK, "cap": 4 * GIB}
        origin = Home(work / "origin", **options)
        prompt = range(HEAVY_TOKENS)
        origin.store(
            prompt, range(HEAVY_BLOCK, HEAVY_TOKENS + 1, HEAVY_BLOCK), kinds={}
        )
        found: dict[str, list[tuple[float, float]]] = {"plain": [], "sealed": []}
        size = 0
        for index in range(2 * ROUNDS):
            way = "sealed" if index % 2 else "plain"
            receiver = Home(work / "receiver", **options)
            receiver.trusted.append(origin.key)
            os.sync()  # nothing is left to be written by another
            began, before = time.perf_counter(), time.process_time()
            size = _carry(
                origin, receiver, prompt, work / "file", sealed=way != "plain"
            )
            found[way].append(
                (time.perf_counter() - began, time.process_time() - before)
            )
            receiver.close()
            shutil.rmtree(work / "receiver")
        origin.close()
    median = {
        f"{way}{name}": statistics.median(each[at] for each in rounds)
        for way, rounds in found.items()
        for at, name in enumerate(("_s", "_cpu_s"))
    }
    ratio = median["sealed_s"] / median["plain_s"]
    return {"artifact_mib": size / MIB, **median, "sealed_to_plain": ratio}


def _carry(
    origin: Home, receiver: Home, prompt: range, path: Path, *, sealed: bool
) -> int:
    recipients = (receiver.recipient.public,) if sealed else ()
    with path.open("wb") as file:
        for piece in origin.open_export(prompt, recipients=recipients).stream():
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    running = receiver.start_import()
    with path.open("rb") as file:
        while piece := file.read(MIB):
            running.feed(piece)
    if running.finish().restored_tokens < len(prompt):
        raise SystemExit("not all of the prefix was restored")
    size = path.stat().st_size
    path.unlink()
    return size


if __name__ == "__main__":
    result = main()
    for label, figure in table(result):
        print(f"{label:60} {figure}")
