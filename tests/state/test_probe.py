"""Which models are carried, and how the others are refused."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.utils import load_model as load_module

from kvport.manifest.blob_layout import ROWS
from kvport.manifest.layout import BlobClass, CacheKind, StateLayout
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import load_model
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.kv_form import Limit, Quantisation
from kvport.snapshot.state.probe import probe
from tests.state.toys import Counting, Remembering, Toy


class Odd(KVCache):
    pass


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: [Odd()], "Odd"),
        (lambda: [RotatingKVCache(4, keep=4)], "keeps as many rows as it has"),
        (lambda: [CacheList(KVCache(), Odd())], r"0\.1 \(Odd\)"),
        (lambda: [KVCache(), CacheList(CacheList(Odd()))], r"1\.0\.0 \(Odd\)"),
    ],
)
def test_b52_unknown_kinds_are_refused_by_name(make, named):
    with pytest.raises(UnsupportedModelError, match=named):
        probe(Toy(make))


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_b45_side_state_is_refused(kind):
    assert probe(Toy(lambda: [KVCache()]))
    with pytest.raises(UnsupportedModelError, match="beside its caches"):
        probe(kind(lambda: [KVCache()]))


def test_what_cannot_be_batched_runs_alone(model_dir, tmp_path):
    model = load_model("m", model_dir("llama4"), FileDigests(tmp_path / "digests"))
    assert model.refusal is None
    assert "ChunkedKVCache" in model.alone


def test_what_keeps_its_first_rows_runs_alone():
    """mlx-lm's batches forget `keep`, and compute other replies without a word."""
    found = probe(Toy(lambda: [KVCache(), RotatingKVCache(8, keep=4)]))
    assert (found.layout.caches[1].keep, found.layout.head) == (4, 4)
    assert "cache 1 keeps its first 4 rows" in found.alone


def test_a_model_that_masks_unequal_lengths_wrongly_runs_alone(model_dir, tmp_path):
    """mlx-lm's gemma2 does: its batched replies, and their state, would be wrong."""
    model = load_model("m", model_dir("gemma2"), FileDigests(tmp_path / "digests"))
    assert "unequal lengths" in model.alone


@pytest.mark.parametrize("kv_form", [Quantisation(8, 32), Limit(48)])
def test_only_plain_caches_take_another_form(model_dir, kv_form):
    module = load_module(model_dir("gemma3_text"))[0]
    with pytest.raises(UnsupportedModelError, match=r"cache 0 \(RotatingKVCache\)"):
        probe(module, kv_form)


def test_slots_that_are_never_set_are_described_and_not_stored():
    found = probe(Toy(lambda: [ArraysCache(3)]))
    (cache,) = found.layout.caches
    assert (cache.slots, [leaf.name for leaf in cache.leaves]) == (3, ["s0"])
    assert "StopIteration" in found.alone


def test_unset_slots_between_set_ones_and_a_dtype_per_leaf():
    def slots(tokens, _):
        last = tokens[:, -1:]
        return {1: last.astype(mx.int64), 4: last % 2 == 0, 7: last.astype(mx.bfloat16)}

    (cache,) = probe(Toy(lambda: [ArraysCache(9)], slots)).layout.caches
    assert cache.slots == 9
    found = {leaf.name: leaf.dtype for leaf in cache.leaves}
    assert found == {"s1": "I64", "s4": "BOOL", "s7": "BF16"}


def test_lists_of_all_kinds_nest():
    def make():
        inner = CacheList(ArraysCache(1), RotatingKVCache(3, keep=1))
        return [CacheList(KVCache(), inner, ChunkedKVCache(8)), KVCache()]

    layout = probe(Toy(make)).layout
    assert [(cache.path, cache.kind) for cache in layout.caches] == [
        ("0.0", CacheKind.KV),
        ("0.1.0", CacheKind.ARRAYS),
        ("0.1.1", CacheKind.ROTATING),
        ("0.2", CacheKind.CHUNKED),
        ("1", CacheKind.KV),
    ]
    assert StateLayout.from_json(layout.to_json()) == layout


def test_fewer_and_more_caches_than_layers(model_dir):
    for arch, caches in (("gemma3n", 2), ("longcat_flash_ngram", 9)):
        module = load_module(model_dir(arch))[0]
        layout = probe(module).layout
        assert len(module.layers) == 4
        assert len(layout.caches) == caches
        roots = {cache.path.partition(".")[0] for cache in layout.caches}
        assert len(roots) == (2 if arch == "gemma3n" else 5)


def test_a_state_that_grows_over_the_first_tokens_is_carried_from_then_on():
    def grams(tokens, cache):
        held = tokens if cache[0] is None else mx.concatenate([cache[0], tokens], 1)
        return {0: held[:, -7:].astype(mx.int64)}

    found = probe(Toy(lambda: [ArraysCache(1)], grams))
    assert found.layout.caches[0].leaves[0].shape == (1, 7)
    assert "another form" in found.alone


def test_a_state_that_grows_for_ever_is_refused():
    def grams(tokens, cache):
        held = tokens if cache[0] is None else mx.concatenate([cache[0], tokens], 1)
        return {0: held}

    with pytest.raises(UnsupportedModelError, match="from token to token"):
        probe(Toy(lambda: [ArraysCache(1)], grams))


def test_b53_leaves_without_bytes_are_described_and_not_stored():
    """Keys without values: the round trip is whole, and they take no bytes."""
    found = probe(Toy(lambda: [KVCache()], value_width=0))
    (cache,) = found.layout.caches
    assert [leaf.shape for leaf in cache.leaves] == [(1, 1, ROWS, 2), (1, 1, ROWS, 0)]
    blob = found.layout.blob(BlobClass.KV, 7)
    assert [tensor.name for tensor in blob.tensors] == ["0.k"]
    assert StateLayout.from_json(found.layout.to_json()) == found.layout
