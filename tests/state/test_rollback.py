"""Caches stepped back hold what they held, whatever was rejected in between."""

import copy
import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.utils import load_model

from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.probe import Quantisation, make_caches, probe
from kvport.snapshot.state.rollback import Snapshot, can_cut, cut
from kvport.snapshot.state.rows import take

CUTTABLE = ["llama", "gemma3_text", "llama4", "deepseek_v3", "gpt_oss", "quantised"]
WHOLE = ["qwen3_5", "mamba2", "falcon_h1", "baichuan_m1"]
POSITIONS = [1, 47, 150]
"""Below, at and past a window of 48 or 64."""


@pytest.fixture(scope="module")
def cases(model_dir):
    made = {}

    def make(arch):
        if arch not in made:
            quantisation, options = None, {"layers": 4}
            if arch == "quantised":
                quantisation = Quantisation(4, 32)
                options = {"layers": 2, "kv_bytes_per_token": 2048}
            directory = model_dir("llama" if arch == "quantised" else arch, **options)
            module = load_model(directory)[0]
            layout = probe(module, quantisation).layout
            made[arch] = module, layout, lambda: make_caches(module, quantisation)
        return made[arch]

    return make


@pytest.fixture
def case(cases, request):
    return cases(request.param)


def ids(length, seed=1):
    return random.Random(seed).choices(range(1, 300), k=length)


def evaluate(module, caches, tokens):
    logits = module(mx.array([tokens]), cache=caches)
    mx.eval(logits, [c.state for c in caches])
    return logits


def filled(module, caches, position):
    """Prefilled, then decoded: a ring that has turned."""
    tokens = ids(position)
    alone = min(5, position)
    if position > alone:
        evaluate(module, caches, tokens[:-alone])
    for token in tokens[-alone:]:
        evaluate(module, caches, [token])


def canonical(layout, caches, position, *, held=None, state=True):
    segments, whole = take(
        layout,
        caches,
        row=0,
        held=held or position,
        cuts=[(0, position)],
        state=state,
    )
    found = [*segments[0].values(), *([whole] if whole else [])]
    return {
        (i, *key): array
        for i, group in enumerate(found)
        for key, array in group.items()
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.shape == theirs[key].shape
        assert mx.array_equal(array, theirs[key]).item()


@pytest.mark.parametrize("case", CUTTABLE, indirect=True)
@pytest.mark.parametrize("position", POSITIONS)
def test_b54_cut_rows_are_those_that_were_computed(case, position):
    module, layout, make = case
    caches = make()
    assert can_cut(caches)
    filled(module, caches, position)
    evaluate(module, caches, ids(9, seed=2))
    held = position + 9
    for count in (1, 5, 2):
        expected = canonical(layout, caches, held - count, held=held, state=False)
        cut(caches, count)
        held -= count
        assert_same(canonical(layout, caches, held), expected)
        for spec, cache in zip(layout.caches, caches, strict=True):
            assert cache.offset == held
            if spec.window is not None:
                keys = cache.keys.shape[2]
                assert keys >= min(held, spec.window)


@pytest.mark.parametrize("case", CUTTABLE, indirect=True)
@pytest.mark.parametrize("position", POSITIONS)
def test_the_model_goes_on_as_if_nothing_had_been_rejected(case, position):
    module, layout, make = case
    caches, plain, accepted = make(), make(), ids(4, seed=3)
    for each in (caches, plain):
        filled(module, each, position)
    evaluate(module, caches, accepted + ids(5, seed=4))
    cut(caches, 5)
    evaluate(module, plain, accepted)
    held = position + len(accepted)
    for tokens in ([7], [8], [9, 10, 11], [12]):
        ours, theirs = (evaluate(module, each, tokens) for each in (caches, plain))
        assert mx.abs(ours - theirs).max().item() < 1e-4
        held += len(tokens)
    ours, theirs = (canonical(layout, each, held) for each in (caches, plain))
    for key, array in ours.items():
        if array.dtype == mx.float32:  # packed values have no neighbours
            assert mx.abs(array - theirs[key]).max().item() < 1e-4


@pytest.mark.parametrize("case", CUTTABLE + WHOLE, indirect=True)
@pytest.mark.parametrize("position", [30, 150])
@pytest.mark.parametrize("since", [[9], [1, 1, 60]])
def test_a_snapshot_brings_every_layer_back(case, position, since):
    module, layout, make = case
    caches = make()
    filled(module, caches, position)
    expected, before = canonical(layout, caches, position), copy.deepcopy(caches)
    snapshot = Snapshot(caches)
    for length in since:
        evaluate(module, caches, ids(length, seed=5))
    snapshot.restore()
    assert_same(canonical(layout, caches, position), expected)
    for tokens in ([7], [8, 9, 10], [11]):
        ours, theirs = (evaluate(module, each, tokens) for each in (caches, before))
        assert mx.array_equal(ours, theirs).item()


@pytest.mark.parametrize("case", WHOLE, indirect=True)
def test_whole_layers_cannot_be_cut(case):
    _, _, make = case
    assert not can_cut(make())


def test_a_cache_of_an_unknown_kind_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"cache 1 \(ConcatenateKVCache\)"):
        can_cut([KVCache(), ConcatenateKVCache()])


def rows(positions):
    """Keys and values that say where they stand."""
    array = mx.array(list(positions), mx.float32).reshape(1, 1, -1, 1)
    return array, -array


def stands(keys):
    return [int(p) for p in keys.flatten().tolist()]


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("seed", range(4))
def test_b47_a_rotating_cache_attends_to_its_window_after_any_rejections(keep, seed):
    window, held = 16, 0
    generator = random.Random(seed)
    cache = RotatingKVCache(max_size=window, keep=keep)
    past = 0
    for _ in range(150):
        length = generator.choice([1, 1, 2, 5, 9])
        keys, values = cache.update_and_fetch(*rows(range(held, held + length)))
        held += length
        attended = sorted(stands(keys))
        assert attended == [-p for p in sorted(stands(values), reverse=True)]
        assert attended[-1] == held - 1
        recent = range(max(0, held - window + keep), held)
        assert {*range(min(keep, held)), *recent} <= {*attended}
        if length == 1:
            assert len(attended) == min(held, window)
        rejected = generator.randrange(length)
        cut([cache], rejected)
        held -= rejected
        assert cache.offset == held
        past += held > window and rejected > 0
    assert past > 20


@pytest.mark.parametrize("seed", range(4))
def test_a_chunked_cache_trims_its_front_by_rows_that_count(seed):
    chunk, held = 16, 0
    generator = random.Random(seed)
    cache = ChunkedKVCache(chunk)
    for _ in range(100):
        length = generator.choice([1, 2, 5, 9])
        cache.maybe_trim_front()
        keys, _ = cache.update_and_fetch(*rows(range(held, held + length)))
        attended = stands(keys)
        assert attended == list(range(attended[0], held + length))
        assert attended[0] <= max(0, held - chunk)
        rejected = generator.randrange(length)
        cut([cache], rejected)
        held += length - rejected


def test_layers_that_never_saw_a_token_are_left_alone():
    caches = [RotatingKVCache(max_size=16), KVCache()]
    cut(caches, 3)
    assert [cache.offset for cache in caches] == [0, 0]
    assert all(cache.keys is None for cache in caches)
