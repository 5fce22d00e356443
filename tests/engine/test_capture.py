"""What is stored, and what comes back: points, restarts, damage, identity."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from kvport.manifest.identity import Lineage, PointKind
from kvport.snapshot.engine.requests import Policy

FORK, PROMPT, REPLY, STRIDE = (
    PointKind.FORK, PointKind.PROMPT, PointKind.REPLY, PointKind.STRIDE,
)  # fmt: skip
KINDS = ["llama", "gemma3_text", "qwen3_5", "mamba2", "falcon_h1"]


def test_worked_example_of_a_hybrid(rig, prompt):
    """Design section 14: nothing of turn 1 is computed or written again."""
    r = rig("qwen3_5")
    turn1 = prompt(600)
    first = r.complete(turn1, max_tokens=100, fork=590)
    whole = turn1 + first.tokens
    match = r.match(whole)
    assert [(n.start, n.end) for n in match.nodes] == [
        (0, 256), (256, 512), (512, 590), (590, 599), (599, 700),
    ]  # fmt: skip
    assert r.points(whole) == {590: {FORK}, 599: {PROMPT}, 700: {REPLY}}
    lineages = [{a.lineage for a in n.attestations} for n in match.nodes]
    assert lineages == [{Lineage.COLD}] * 2 + [{Lineage.DERIVED}] * 3

    kept = r.complete([*whole, 5, 6, 7], write=False)
    assert kept.restored == 700, "had turn 2 kept the reasoning"
    turn2 = turn1[:590] + prompt(410, seed=2)
    second = r.complete(turn2, fork=900)
    assert second.restored == 590
    stored = {n.id for n in match.nodes}
    path = r.match(turn2).nodes
    assert [n.id in stored for n in path[:4]] == [True, True, True, False]
    assert [n.start for n in path[3:]] == [590, 768, 900]
    assert r.match(whole).position == 590, "nobody asks for the old reply again"


def test_full_layers_restore_exactly_where_texts_part(rig, prompt):
    r = rig("llama")
    turn1 = prompt(600)
    r.complete(turn1, max_tokens=10)
    assert r.complete(turn1[:571] + prompt(40, seed=3)).restored == 571
    assert r.complete(turn1[:1] + prompt(40, seed=4)).restored == 1


def test_b32_a_request_right_after_another_sees_its_state(rig, prompt):
    r = rig("qwen3_5")
    running = [r.start(prompt(900), max_tokens=1) for _ in range(3)]
    assert [x.answer().restored for x in running] == [0, 899, 899]


@pytest.mark.parametrize("arch", KINDS)
def test_b03_b60_b61_restart_restores_all_but_the_last_token(rig, prompt, arch):
    """After a restart the prompt is restored, and answers the same."""
    tokens = prompt(1100)
    r = rig(arch, stride=512)
    cold = r.complete(tokens, max_tokens=20, full_logprobs=True)
    assert cold.restored == 0
    hot = r.complete(tokens, max_tokens=20, full_logprobs=True)
    r.close()
    r = rig(arch, stride=512)
    assert r.points(tokens) == {512: {STRIDE}, 1024: {STRIDE}, 1099: {PROMPT}}
    warm = r.complete(tokens, max_tokens=20, full_logprobs=True)
    assert hot.restored == warm.restored == 1099
    assert np.array_equal(hot.logprobs, warm.logprobs)
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("arch", KINDS)
def test_batched_replies_restore_like_they_went_on(rig, prompt, arch):
    """Staggered requests in one batch: every reply's end is a restore point."""
    r = rig(arch)
    prompts = [prompt(n, seed=n) for n in (300, 70, 513, 1, 2)]
    running = [r.start(p, max_tokens=30 + 7 * i) for i, p in enumerate(prompts)]
    wholes = [p + x.answer().tokens for p, x in zip(prompts, running, strict=True)]
    hot = [r.complete([*w, 9], full_logprobs=True) for w in wholes]
    r.close()
    r = rig(arch)
    for whole, before in zip(wholes, hot, strict=True):
        again = r.complete([*whole, 9], full_logprobs=True)
        assert again.restored == before.restored == len(whole)
        assert np.array_equal(again.logprobs, before.logprobs)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_b39_b40_exact_equals_an_empty_cache(rig, prompt, arch):
    """Whatever was asked before, `exact` answers like a fresh machine."""
    tokens = prompt(1300)
    options = {"max_tokens": 20, "full_logprobs": True, "policy": Policy.EXACT}
    fresh = rig(arch, home="fresh", stride=512).complete(tokens, **options)
    r = rig(arch, stride=512)
    for seed in (1, 2):
        r.complete(tokens[:700] + prompt(400, seed=seed), max_tokens=9)
    shared = r.complete(tokens, **options)
    assert shared.restored == 512
    assert np.array_equal(shared.logprobs, fresh.logprobs)
    again = r.complete(tokens, **options)
    assert again.restored == 1024
    assert np.array_equal(again.logprobs, fresh.logprobs)


@pytest.mark.parametrize("arch", ["falcon_h1", "mamba2", "llama"])
def test_exact_restores_up_to_the_fork_only(rig, prompt, arch):
    """An empty cache would stop at the fork: cold state beyond it has other bits."""
    tokens, fork = prompt(321), 314
    options = {"max_tokens": 20, "full_logprobs": True, "policy": Policy.EXACT}
    small = {"chunk": 64, "stride": 64, "block": 64}
    fresh = rig(arch, home="b", **small).complete(tokens, fork=fork, **options)
    r = rig(arch, **small)
    r.complete([*tokens, 1, 2, 3, 4, 5], policy=Policy.EXACT)
    again = r.complete(tokens, fork=fork, **options)
    assert again.restored == (320 if arch == "llama" else 256)
    assert np.array_equal(again.logprobs, fresh.logprobs)


def test_exact_never_restores_decoded_or_foreign_state(rig, prompt):
    r = rig("llama", chunk=256)
    tokens = prompt(200)
    whole = tokens + r.complete(tokens, max_tokens=400).tokens
    assert r.complete([*whole, 1], policy=Policy.EXACT).restored == 0
    assert r.complete([*whole, 1]).restored == len(whole)
    other = rig("llama", home="b", chunk=256)
    other.complete(whole)
    numerics = other.engine.numerics
    assert other.match(whole).nodes[0].attestations[0].numerics == numerics


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_b44_damage_is_a_miss_and_never_an_answer(rig, prompt, arch):
    """A damaged path is walked back from; what is left restores exactly."""
    tokens = prompt(1100)
    r = rig(arch, stride=512)
    cold = r.complete(tokens, full_logprobs=True)
    node = next(n for n in r.match(tokens).nodes if n.start == 512)
    r.close()
    for ref in node.blobs:
        (path,) = r.cache_root.rglob(ref.digest.hex())
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    r = rig(arch, stride=512)
    again = r.complete(tokens, full_logprobs=True)
    assert again.restored == 512
    assert again.tokens == cold.tokens
    assert r.complete(tokens).restored == 1099


@pytest.mark.parametrize("arch", KINDS)
def test_b58_b64_edges_of_the_prompt(rig, prompt, arch):
    """Prompts of one token up; the same prompt again; one token more or less."""
    r = rig(arch)
    for length in (1, 2, 3, 255, 256, 257, 512, 513):
        tokens = prompt(length, seed=length)
        r.complete(tokens, max_tokens=1)
        assert r.complete(tokens, max_tokens=1).restored == length - 1
        longer = r.complete([*tokens, 7], max_tokens=1)
        assert longer.restored >= length - 1


def test_b43_requantised_weights_under_the_old_name_never_hit(
    rig, prompt, model_dir, tmp_path
):
    directory = tmp_path / "models" / "m"
    shutil.copytree(model_dir("llama"), directory)
    tokens = prompt(300)
    r = rig(directory)
    r.complete(tokens)
    r.close()
    moved = directory.rename(tmp_path / "models" / "elsewhere")
    (moved / "README.md").write_text("a note changes nothing")
    r = rig(moved)
    assert r.complete(tokens).restored == 299, "moved and renamed: still a hit"
    before = r.engine.model("m").identity
    r.close()

    weights = mx.load(str(moved / "model.safetensors"))  # noqa: TID251 - to change it
    weights = {k: v.astype(mx.float16).astype(mx.float32) for k, v in weights.items()}
    mx.save_safetensors(str(moved / "model.safetensors"), weights)
    moved.rename(directory)
    r = rig(directory)
    assert r.complete(tokens).restored == 0
    after = r.engine.model("m").identity
    assert after.mismatched_fields(before) == ("model_files",)


def test_quantised_weights_have_another_identity(rig, prompt, model_dir, tmp_path):
    from mlx_lm.utils import load, quantize_model, save

    source, target = model_dir("llama"), tmp_path / "q"
    model, tokenizer, config = load(str(source), return_config=True)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save(target, source, model, tokenizer, config)
    r = rig(source)
    r.complete(prompt(300))
    plain = r.engine.model("m").identity
    r.close()
    r = rig(target)
    assert r.complete(prompt(300)).restored == 0
    quantised = r.engine.model("m").identity
    assert {"model_files", "quant"} <= set(quantised.mismatched_fields(plain))
    assert quantised.quant["bits"] == 4
    assert json.dumps(quantised.to_json())


def test_requests_that_read_or_write_nothing_leave_no_trace(rig, prompt):
    r = rig("qwen3_5")
    tokens = prompt(600)
    r.complete(tokens, write=False)
    assert r.match(tokens) is None
    r.complete(tokens)
    assert r.complete(tokens, read=False).restored == 0
