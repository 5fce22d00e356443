"""Which models are carried, and how the others are refused."""

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from kvport.manifest.layout import ROWS, BlobClass, StateLayout
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import load_model
from kvport.snapshot.errors import UnsupportedModelError
from kvport.snapshot.state.probe import probe


class Toy(nn.Module):
    """A model of one row per token, with whatever cache it is told to make."""

    def __init__(self, make, side_state=False, value_width=2):
        super().__init__()
        self.layers = []
        self._make, self._side, self._seen = make, side_state, 0
        self._width = value_width

    def make_cache(self):
        return self._make()

    def __call__(self, tokens, cache=None):
        rows = mx.broadcast_to(
            tokens[:, None, :, None], (*tokens.shape[:1], 1, tokens.shape[1], 2)
        )
        rows = rows.astype(mx.float32)
        out = mx.zeros((*tokens.shape, 4))
        for member in cache:
            for one in member.caches if isinstance(member, CacheList) else [member]:
                if isinstance(one, ArraysCache):
                    one[0] = rows[:, 0, -1:, :]
                else:
                    values = rows[..., : self._width]
                    keys, _ = one.update_and_fetch(rows, values)
                    out = out + keys.sum()
        self._seen += tokens.shape[1]
        return out + self._seen if self._side else out


class Odd(KVCache):
    pass


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: [Odd()], "Odd"),
        (lambda: [RotatingKVCache(8, keep=4)], "keeps its first 4 rows"),
        (lambda: [CacheList(KVCache(), Odd())], r"0\.1 \(Odd\)"),
    ],
)
def test_b52_unknown_kinds_are_refused_by_name(make, named):
    with pytest.raises(UnsupportedModelError, match=named):
        probe(Toy(make))


def test_b45_side_state_is_refused():
    assert probe(Toy(lambda: [KVCache()]))
    with pytest.raises(UnsupportedModelError, match="beside its caches"):
        probe(Toy(lambda: [KVCache()], side_state=True))


def test_what_cannot_be_batched_runs_alone(model_dir, tmp_path):
    model = load_model("m", model_dir("llama4"), FileDigests(tmp_path / "digests"))
    assert model.refusal is None
    assert "ChunkedKVCache" in model.alone


def test_a_model_that_masks_unequal_lengths_wrongly_runs_alone(model_dir, tmp_path):
    """mlx-lm's gemma2 does: its batched replies, and their state, would be wrong."""
    model = load_model("m", model_dir("gemma2"), FileDigests(tmp_path / "digests"))
    assert "unequal lengths" in model.alone


def test_slots_that_are_never_set_are_described_and_not_stored():
    found = probe(Toy(lambda: [ArraysCache(3)]))
    (cache,) = found.layout.caches
    assert (cache.slots, [leaf.name for leaf in cache.leaves]) == (3, ["s0"])
    assert "StopIteration" in found.alone


def test_b53_leaves_without_bytes_are_described_and_not_stored():
    """Keys without values: the round trip is whole, and they take no bytes."""
    found = probe(Toy(lambda: [KVCache()], value_width=0))
    (cache,) = found.layout.caches
    assert [leaf.shape for leaf in cache.leaves] == [(1, 1, ROWS, 2), (1, 1, ROWS, 0)]
    blob = found.layout.blob(BlobClass.KV, 7)
    assert [tensor.name for tensor in blob.tensors] == ["0.k"]
    assert StateLayout.from_json(found.layout.to_json()) == found.layout
