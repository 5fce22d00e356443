"""Reports about state that came back wrong, in part, or in name only.

B44, B58, B64: engine/test_capture.py. B61 after a kill: api/test_killed.py. B65 below
the engine: state/test_round_trip.py.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from kvport.manifest.layout import BlobClass
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.engine.requests import Policy, Sampling
from kvport.snapshot.state.kv_form import Quantisation
from tests.cache.builder import blob_files
from tests.field_reports.restoring import carry, restored_caches
from tests.field_reports.toys import IntegerState, SubclassedCache

SMALL = {"chunk": 64, "stride": 64, "block": 64}
FULL = {"max_tokens": 8, "full_logprobs": True}
EXACT = FULL | {"policy": Policy.EXACT}


def far_apart(left, right):
    return np.abs(left.logprobs - right.logprobs).max()


@pytest.mark.parametrize("arch", ["qwen3_next", "lfm2_moe"])
def test_b37_restored_state_of_a_mixture_of_experts_is_cold_state(rig, prompt, arch):
    """A hybrid with experts, its first real hit, sampling left as it was."""
    tokens = prompt(300)
    options = EXACT | {"sampling": Sampling(temperature=0.8, top_p=0.95, seed=11)}
    r = rig(arch, **SMALL)
    cold = r.complete(tokens, **options)
    r.close()
    r = rig(arch, **SMALL)
    warm = r.complete(tokens, **options)
    assert (cold.restored, warm.restored) == (0, 256)
    assert warm.tokens == cold.tokens
    assert np.array_equal(warm.logprobs, cold.logprobs)
    assert len(set(warm.tokens)) > 1


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_b39_cache_off_cold_and_warm_answer_alike(rig, prompt, model_dir, arch):
    """Temperature 0, one prompt: without a cache, with an empty one, with a full one.

    Under `exact` bit for bit; under `nearest` the same tokens within rounding.
    """
    tokens = prompt(300)
    r = rig(arch, **SMALL)
    r.engine.load("uncached", model_dir(arch), r.files, lambda _: None)
    off = [r.complete(tokens, name="uncached", **EXACT) for _ in range(2)]
    silent = r.complete(tokens, read=False, write=False, **EXACT)
    cold = r.complete(tokens, **EXACT)
    warm = [r.complete(tokens, **EXACT) for _ in range(2)]
    assert [a.restored for a in (*off, silent, cold, *warm)] == [0] * 4 + [256] * 2
    for answer in (*off, silent, *warm):
        assert answer.tokens == cold.tokens
        assert np.array_equal(answer.logprobs, cold.logprobs)
    near = [r.complete(tokens, **FULL) for _ in range(2)]
    assert [answer.restored for answer in near] == [299, 299]
    assert np.array_equal(near[0].logprobs, near[1].logprobs)
    assert near[0].tokens == cold.tokens
    assert far_apart(near[0], cold) < 1e-4


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_b40_what_was_asked_before_does_not_show(rig, prompt, arch):
    """A fixed seed; A, B, C and C again, against C alone on an empty cache."""
    options = EXACT | {"sampling": Sampling(temperature=0.9, seed=3)}
    shared = prompt(200)
    a, b, c = (shared + prompt(60 + 9 * i, seed=i) for i in (1, 2, 3))
    alone = rig(arch, home="alone", **SMALL).complete(c, **options)
    r = rig(arch, **SMALL)
    r.complete(a, **options)
    r.complete(b, max_tokens=3)
    answers = [r.complete(c, **options) for _ in range(2)]
    assert [answer.restored for answer in answers] == [192, 256]
    for answer in answers:
        assert answer.tokens == alone.tokens
        assert np.array_equal(answer.logprobs, alone.logprobs)


def test_b47_a_wrapped_window_is_reused_from_a_boundary_only(rig, prompt):
    """A window long since wrapped; an earlier part of the prompt is asked for again."""
    tokens = prompt(400)
    r = rig("gemma3_text", **SMALL)
    window = r.engine.model("m").layout.max_window
    assert window < 64
    r.complete(tokens)
    cold = rig("gemma3_text", home="cold", **SMALL)
    options = FULL | {"max_tokens": window + 5}
    for position in (200, 256):
        other = tokens[:position] + prompt(40, seed=position)
        answer = r.complete(other, **options)
        boundary = position - position % 64
        assert boundary <= answer.restored <= position
        expected = cold.complete(other, read=False, **options)
        assert answer.tokens == expected.tokens
        assert far_apart(answer, expected) < 1e-4


def test_b48_inner_blocks_need_no_recurrent_part(rig, prompt, model_dir):
    """40 layers, 30 of them recurrent; a restart; the same prompt again."""
    directory = model_dir("qwen3_5", layers=40)
    distances = {"chunk": 32, "stride": 64, "block": 32}
    tokens = prompt(100)
    r = rig(directory, **distances)
    first = r.complete(tokens, max_tokens=2)
    nodes = r.match(tokens).nodes
    assert [node.end for node in nodes] == [32, 64, 96, 99]
    assert [node.end for node in nodes if node.blob(BlobClass.STATE)] == [64, 99]
    r.close()
    before = blob_files(r.cache_root)
    r = rig(directory, **distances)
    again = r.complete(tokens, max_tokens=2)
    assert (again.restored, again.tokens) == (99, first.tokens)
    r.close()
    assert blob_files(r.cache_root) == before, "no write without benefit"


def test_b49_restored_tokens_are_counted_and_not_matches(rig, prompt, toy_dir):
    """State with an integer in it; then a match without a single restore point."""
    tokens = prompt(300)
    r = rig(toy_dir(IntegerState), **SMALL | {"stride": 256})
    assert r.engine.model("m").layout.caches[-1].leaves[0].dtype == "I64"
    answers = [r.complete(tokens, **FULL) for _ in range(3)]
    assert np.array_equal(answers[2].logprobs, answers[1].logprobs)
    assert far_apart(answers[1], answers[0]) < 1e-4
    answers.append(r.complete(tokens[:200] + prompt(20, seed=1)))
    told = [answer.restored for answer in answers]
    assert told == [0, 299, 299, 0]
    assert r.cache.longest(r.namespace, encode_tokens(tokens[:200])) == 200
    counts = r.engine.counts["m"]
    assert (counts.hits, counts.misses) == (2, 2)
    assert counts.restored_tokens == sum(told)
    assert counts.computed_tokens == counts.prompt_tokens - sum(told)


def test_b49_a_subclassed_cache_is_refused_and_never_silently_skipped(
    rig, prompt, toy_dir
):
    """A cache object of a class derived from one that is known."""
    r = rig(toy_dir(SubclassedCache))
    assert "Subclassed" in r.engine.model("m").refusal
    assert r.engine.store("m") is None
    assert [r.complete(prompt(40)).restored for _ in range(2)] == [0, 0]
    assert r.engine.counts["m"].restored_tokens == 0


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "llama4", "falcon_h1"])
def test_b51_offsets_come_from_the_record(rig, prompt, arch):
    """After a restore every layer stands at the restored position, none at 0."""
    tokens = prompt(200)
    r = rig(arch, **SMALL)
    live = r.complete(tokens, **FULL)
    position, caches = restored_caches(r, tokens)
    assert position == 199
    offsets = {cache.offset for cache in caches if hasattr(cache, "offset")}
    assert offsets == {199}
    assert far_apart(r.complete(tokens, **FULL), live) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_b54_a_prefix_of_quantised_rows_is_cut_in_every_layer(
    rig, prompt, model_dir, bits
):
    """Quantised keys and values, cut to 17 of 253 tokens, and continued."""
    directory = model_dir("llama", kv_bytes_per_token=4096)
    options = {"kv_form": Quantisation(bits, 32), **SMALL}
    tokens = prompt(253)
    r = rig(directory, **options)
    r.complete(tokens)
    other = tokens[:17] + prompt(30, seed=1)
    position, caches = restored_caches(r, other)
    assert position == 17
    assert {cache.offset for cache in caches} == {17}
    arrays = [array for c in caches for array in (*c.keys, *c.values)]
    assert len(arrays) == 6 * len(caches)
    assert {array.shape[2] for array in arrays} == {17}
    answer = r.complete(other, **FULL)
    assert answer.restored == 17
    cold = rig(directory, home="b", **options).complete(other, **FULL)
    assert answer.tokens == cold.tokens
    assert far_apart(answer, cold) < 1e-3


@pytest.mark.parametrize("arch", ["gemma3_text", "baichuan_m1"])
def test_b55_windows_of_unequal_filling_are_merged(rig, prompt, arch):
    """A wrapped window, one that is nearly empty and one just full, in one batch."""
    r = rig(arch, **SMALL)
    window = r.engine.model("m").layout.max_window
    lengths, options = (3 * window + 3, 7, window), FULL | {"max_tokens": window}
    prompts = [prompt(length, seed=length) for length in lengths]
    alone = [r.complete(tokens, **options) for tokens in prompts]
    running = [r.start(tokens, **options) for tokens in prompts]
    for tokens, one, before in zip(prompts, running, alone, strict=True):
        answer = one.answer()
        assert answer.restored == len(tokens) - 1
        assert answer.tokens == before.tokens
        assert far_apart(answer, before) < 1e-3
    whole = [*prompts[1], *alone[1].tokens, 5]
    later = r.complete(whole, **FULL)
    assert later.restored == len(whole) - 1
    assert far_apart(later, r.complete(whole, read=False, **FULL)) < 1e-3


@pytest.mark.parametrize(
    ("arch", "distance"), [("qwen3_5", 64), ("qwen3_5", 192), ("llama", 1)]
)
def test_b59_the_restore_point_is_near_the_match_and_settable(
    rig, prompt, arch, distance
):
    """Prompts that part from what is stored at any position."""
    tokens = prompt(500)
    r = rig(arch, chunk=64, block=64, stride=max(distance, 64))
    r.complete(tokens)
    for parting in (200, 383, 384):
        other = tokens[:parting] + prompt(20, seed=parting)
        restored = r.complete(other, write=False).restored
        assert parting - distance < restored <= parting


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_b60_b61_what_an_import_says_is_what_a_request_restores(
    rig, prompt, tmp_path, arch
):
    """Saved, taken to a fresh process, asked with the very same prompt."""
    tokens = prompt(300)
    here, there = rig(arch, **SMALL), rig(arch, home="b", **SMALL)
    here.complete(tokens)
    hot = here.complete(tokens, **FULL)
    result = carry(here, there, tokens, tmp_path)
    there.close()
    there = rig(arch, home="b", **SMALL)
    answer = there.complete(tokens, **FULL)
    assert result.restored_tokens >= 299
    assert answer.restored == min(result.restored_tokens, 299) == hot.restored
    assert np.array_equal(answer.logprobs, hot.logprobs)
    assert there.engine.counts["m"].computed_tokens == 1


@pytest.mark.parametrize("length", [40, 200])
def test_b65_window_models_go_on_as_before_after_a_restart(rig, prompt, length):
    """Below and far past the window: saved, loaded, 16 tokens compared."""
    tokens = prompt(length)
    r = rig("gemma3_text", **SMALL)
    cold = r.complete(tokens, **FULL)
    hot = r.complete(tokens, **FULL | {"max_tokens": 16})
    r.close()
    r = rig("gemma3_text", **SMALL)
    warm = r.complete(tokens, **FULL | {"max_tokens": 16})
    assert warm.restored == length - 1
    assert np.array_equal(warm.logprobs, hot.logprobs)
    assert warm.tokens[:8] == cold.tokens


@pytest.mark.parametrize("arch", ["qwen3_5", "lfm2", "mamba2", "falcon_h1"])
def test_b76_every_member_of_a_state_is_of_its_own_prompt(rig, prompt, arch):
    """States beside the rows, stored for two prompts in turn, read back from the disk.

    Against a cache that never saw the other prompt: every tensor of every layer.
    """
    mine, other = (prompt(200, seed=seed) for seed in (1, 2))
    found = []
    for home, prompts in (("shared", [mine, other, mine]), ("alone", [mine])):
        r = rig(arch, home=home, **SMALL)
        for tokens in prompts:
            r.complete(tokens, max_tokens=3)
        r.close()
        r = rig(arch, home=home, **SMALL)
        position, caches = restored_caches(r, mine)
        assert position == 199
        found.append(
            [array for c in caches for array in r.engine.call(lambda c=c: tensors(c))]
        )
    shared, alone = found
    assert shared
    assert len(shared) == len(alone)
    for left, right in zip(shared, alone, strict=True):
        assert np.array_equal(left, right)


def tensors(cache):
    """Copies of all arrays of a cache; the toys are of float32."""
    return [
        np.array(array)
        for _, array in tree_flatten(cache.state)
        if isinstance(array, mx.array)
    ]
