"""The case that other caches lose: a deep hybrid, a long prompt, a restart.

48 layers, 36 of them recurrent. In full a prompt of 34,886 tokens at chunk 512 and
stride 4096; here the same shape at 1/64, with all distances scaled alike.
"""

import pytest

from kvport.manifest.identity import PointKind

FULL, SCALED = 1, 64


def check(rig, prompt, model, scale):
    length = 34_886 // scale
    distances = {"chunk": 512 // scale, "stride": 4096 // scale, "block": 256 // scale}
    tokens = prompt(length)
    r = rig(model, **distances)
    cold = r.complete(tokens, max_tokens=2)
    r.close()
    r = rig(model, **distances)
    stride = distances["stride"]
    expected = {p: {PointKind.STRIDE} for p in range(stride, length, stride)}
    assert len(expected) == 8
    assert r.points(tokens) == expected | {length - 1: {PointKind.PROMPT}}
    warm = r.complete(tokens, max_tokens=2)
    assert warm.restored == length - 1
    assert warm.tokens == cold.tokens


def test_b01_b03_hybrid_of_48_layers_at_one_64th(rig, prompt, model_dir):
    check(rig, prompt, model_dir("qwen3_5", layers=48), SCALED)


@pytest.mark.soak
def test_b01_b03_hybrid_of_48_layers_in_full(rig, prompt, model_dir):
    check(rig, prompt, model_dir("qwen3_5", layers=48), FULL)
