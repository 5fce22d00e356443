"""What capture and drafting cost and save, against plain mlx-lm and against themselves.

Each round runs both sides one after the other in one process, on prompts that nothing
was stored of; ratios are of medians. `prefill` is the time to the first token, against
mlx-lm's `generate_step` with the same chunk; `decode` is the time of a reply that is
captured, against one that is not; `drafted` is the time of a reply without drafts,
against the same reply with prompt lookup.
"""

import queue
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from kvport.manifest.keys import SigningKey
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.engine.builder import build_model
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.requests import Failed, Generated, Request
from kvport.snapshot.engine.runner import Store
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.volume import Volume

ROUNDS = 5
CHUNK, STRIDE = 512, 4096
PROMPT = 8_300
"""Two stride points, and some more."""
REPLY = 700
DRAFTED = 2_000
MODELS = {"dense": "llama", "hybrid": "qwen3_5", "window": "gemma3_text"}


def table(result: dict) -> list[tuple[str, str]]:
    """Label and figure, for people."""
    rows = []
    for kind, arch in MODELS.items():
        found = result[kind]
        rows += [
            (f"{kind} ({arch}): prefill with capture / plain mlx-lm",
             f"{found['prefill']:.3f}"),
            (f"{kind} ({arch}): decode with capture / without",
             f"{found['decode']:.3f}"),
            (f"{kind} ({arch}): drafted, speed / undrafted", f"{found['drafted']:.2f}"),
            (f"{kind} ({arch}): accepted tokens per step",
             f"{found['accepted_per_step']:.2f}"),
        ]  # fmt: skip
    return rows


def main() -> dict:
    result = {"benchmark": "engine", "rounds": ROUNDS}
    for kind, arch in MODELS.items():
        with tempfile.TemporaryDirectory() as name:
            result[kind] = _model(Path(name), arch)
    return result


def _model(work: Path, arch: str) -> dict:
    build_model(arch, work / "model")
    louder = _louder(work / "model", work / "louder")
    plain, _ = load(str(work / "model"))
    found: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    with _Opened(work / "a", work / "model", None) as opened:
        for index in range(ROUNDS):
            prompt = _random(index)
            add("plain", _plain(plain, prompt))
            add("prefill", opened.run(prompt, 1))
            add("captured", opened.run(prompt[:600], REPLY))
            add("uncaptured", opened.run(prompt[:600], REPLY, write=False))
    with (
        _Opened(work / "b", louder, None) as undrafted,
        _Opened(work / "c", louder, DraftSource()) as drafted,
    ):
        for _ in range(ROUNDS):
            prompt = (_random(0)[:13] * 10)[:128]
            add("undrafted", undrafted.run(prompt, DRAFTED))
            add("drafted", drafted.run(prompt, DRAFTED))
        counts = drafted.engine.counts["m"]
    took = {name: statistics.median(values) for name, values in found.items()}
    steps = counts.generated_tokens - counts.accepted_tokens
    return {
        "prefill": took["prefill"] / took["plain"],
        "decode": took["captured"] / took["uncaptured"],
        "drafted": took["undrafted"] / took["drafted"],
        "accepted_per_step": counts.accepted_tokens / steps,
    }


def _random(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 300, PROMPT).tolist()


def _plain(model, prompt: list[int]) -> float:
    began = time.perf_counter()
    steps = generate_step(
        mx.array(prompt), model, max_tokens=1, prefill_step_size=CHUNK
    )
    next(iter(steps))
    return time.perf_counter() - began


def _louder(source: Path, target: Path) -> Path:
    """The same model with embeddings four times as large: its replies repeat."""
    import shutil

    shutil.copytree(source, target)
    file = target / "model.safetensors"
    weights = mx.load(str(file))  # noqa: TID251 - to change it
    for name, array in weights.items():
        if "embed_tokens" in name and name.endswith("weight"):
            weights[name] = array * 4
    mx.save_safetensors(str(file), weights)
    return target


class _Opened:
    """An engine with one model on an empty cache."""

    def __init__(self, work: Path, model: Path, draft: DraftSource | None) -> None:
        work.mkdir()
        self.cache = Cache.open(Opening(root=work / "cache", free_floor=0))
        self.engine = Engine(Tuning(chunk=CHUNK, stride=STRIDE, draft=draft))
        local = SigningKey.generate().public.key_id

        def store(found) -> Store:
            namespace = self.cache.namespace(found.identity, "default", BLOCK_SIZE)
            volume = Volume.holding(self.cache)
            return Store(volume=volume, namespace=namespace, local=local)

        self.engine.load("m", model, FileDigests(work / "digests.json"), store)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.cache.close()

    def run(self, prompt, count, *, write=True) -> float:
        """Seconds of a request that restores nothing."""
        events = queue.SimpleQueue()
        self.cache.flush()
        request = Request(
            tokens=prompt, max_tokens=count, ignore_eos=True, read=False, write=write
        )
        began = time.perf_counter()
        self.engine.submit("m", request, events.put)
        while True:
            match events.get():
                case Generated(finish=finish) if finish is not None:
                    return time.perf_counter() - began
                case Failed(error=error):
                    raise error
