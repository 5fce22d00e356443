"""The case that other caches lose: a deep hybrid, a long prompt, a kill.

48 layers, 36 of them recurrent. In full a prompt of 34,886 tokens at chunk 512 and
stride 4096; here the same shape at 1/64, with all distances scaled alike. With drafts
or without: the same points, the same restored tokens.
"""

import json
import subprocess
import sys

import pytest

from kvport.manifest.identity import PointKind
from kvport.snapshot.engine.drafting.drafter import DraftSource

FULL, SCALED = 1, 64


def check(rig, prompt, model, tmp_path, scale, *, draft):
    length = 34_886 // scale
    distances = {"chunk": 512 // scale, "stride": 4096 // scale, "block": 256 // scale}
    tokens = prompt(length)
    first = rig(model, **distances)
    first.close()
    asked = tmp_path / "prompt.json"
    asked.write_text(json.dumps(tokens))
    settings = json.dumps(distances | {"draft": draft and str(draft)})
    killed = subprocess.run(
        [
            sys.executable, "-m", "tests.engine.killed", str(first.root), str(model),
            first.key.to_bytes().hex(), str(asked), settings,
        ],
        capture_output=True,
        check=False,
        text=True,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    reply = json.loads(killed.stdout)

    r = rig(model, **distances, draft=draft and DraftSource(draft))
    stride = distances["stride"]
    expected = {p: {PointKind.STRIDE} for p in range(stride, length, stride)}
    assert len(expected) == 8
    assert r.points(tokens) == expected | {length - 1: {PointKind.PROMPT}}
    warm = r.complete(tokens, max_tokens=40)
    assert warm.restored == length - 1
    assert warm.tokens == reply
    assert bool(r.engine.counts["m"].drafted_tokens) == bool(draft)


@pytest.mark.parametrize("drafted", [False, True])
def test_b01_b03_hybrid_of_48_layers_at_one_64th(
    rig, prompt, model_dir, tmp_path, drafted
):
    model, draft = model_dir("qwen3_5", layers=48), drafted and model_dir("llama")
    check(rig, prompt, model, tmp_path, SCALED, draft=draft or None)


@pytest.mark.soak
@pytest.mark.parametrize("drafted", [False, True])
def test_b01_b03_hybrid_of_48_layers_in_full(rig, prompt, model_dir, tmp_path, drafted):
    model, draft = model_dir("qwen3_5", layers=48), drafted and model_dir("llama")
    check(rig, prompt, model, tmp_path, FULL, draft=draft or None)
