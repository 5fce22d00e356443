"""Live caches to blobs and back: bit for bit, whatever batch and cuts."""

import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kvport.manifest.errors import ArithmeticMismatchError, TensorHeaderError
from kvport.manifest.layout import BlobClass, LayerClass
from kvport.snapshot.engine.mlx_private import Batch
from kvport.snapshot.engine.steps import NewSequence
from kvport.snapshot.state.blobs import Assembly, to_buffers
from kvport.snapshot.state.kinds import flatten, leaves
from kvport.snapshot.state.probe import make_caches, probe
from kvport.snapshot.state.rows import take

ARCHITECTURES = [
    "llama", "qwen3", "gemma3_text", "qwen3_5", "qwen3_next", "mamba2", "falcon_h1",
    "lfm2", "deepseek_v3", "baichuan_m1", "kimi_linear", "gpt_oss",
]  # fmt: skip
CHUNK = 32


@pytest.fixture
def model(model_dir, request):
    return load_model(model_dir(request.param))[0]


def blobs_of(layout, leaves, rows):
    return {
        blob_class: b"".join(to_buffers(layout, blob_class, rows, group))
        for blob_class, group in leaves.items()
    }


class Captured:
    """Every segment of a sequence as blobs, with the state at its end."""

    def __init__(self, layout):
        self.layout, self.segments, self.state = layout, [], None

    def take(self, live, cuts):
        cuts = [c for c in cuts if c[0] < c[1]]
        segments, state = take(
            self.layout,
            live.caches,
            row=live.row,
            held=live.held,
            cuts=cuts,
            state=True,
        )
        for (start, end), group in zip(cuts, segments, strict=True):
            self.segments.append(
                (start, end, blobs_of(self.layout, group, end - start))
            )
        if state is not None:
            self.state = blobs_of(self.layout, {BlobClass.STATE: state}, 1)

    def restore(self):
        end = self.segments[-1][1]
        assembly = Assembly(self.layout, end)
        for start, stop, blobs in self.segments:
            for blob_class, blob in blobs.items():
                if assembly.wants(blob_class, start, stop):
                    assembly.add(blob_class, start, stop, memoryview(blob))
        if self.state is not None:
            blob = memoryview(self.state[BlobClass.STATE])
            assembly.add(BlobClass.STATE, 0, end, blob)
        return assembly.caches()


def prompt_of(length, seed):
    mx.random.seed(seed)
    return mx.random.randint(1, 300, (length,)).tolist()


def insert(batch, prompt, max_tokens=1000):
    bounds = [*range(0, len(prompt) - 1, CHUNK), len(prompt) - 1, len(prompt)]
    segments = [prompt[a:b] for a, b in itertools.pairwise(bounds)]
    return batch.insert(NewSequence(segments=segments, max_tokens=max_tokens))


@pytest.mark.parametrize("model", ARCHITECTURES, indirect=True)
def test_staggered_batch_restores_what_mlx_lm_extracts(model):
    """Prefill and batched decode of three sequences, captured 16 rows at a time."""
    layout = probe(model).layout
    batch = Batch(model, CHUNK, lambda: make_caches(model, None))
    captured, done = {}, {}
    lengths = iter([150, 70, 101])
    for step in range(110):
        if step % 12 == 0 and (length := next(lengths, None)) is not None:
            uid = insert(batch, prompt_of(length, seed=length))
            captured[uid], done[uid] = Captured(layout), 0
        result = batch.step()
        for uid in {*result.prefilled, *(t.uid for t in result.tokens)}:
            live = batch.live(uid)
            in_prefill = uid in result.prefilled
            if in_prefill or live.held % 16 == 0:
                cuts = [
                    (a, min(a + 16, live.held)) for a in range(done[uid], live.held, 16)
                ]
                captured[uid].take(live, cuts)
                done[uid] = live.held
    compared = 0
    for uid, found in captured.items():
        live = batch.live(uid)
        found.take(live, [(done[uid], live.held)])
        expected = [c.extract(live.row) for c in live.caches]
        if found.segments[-1][1] != live.held:
            continue
        restored = found.restore()
        for spec, (_, ours), (_, theirs) in zip(
            layout.caches, flatten(restored), flatten(expected), strict=True
        ):
            for our, their in zip(
                leaves(ours).values(), leaves(theirs).values(), strict=True
            ):
                if spec.layer_class is not LayerClass.WHOLE:
                    their = their[:, :, -our.shape[2] :]  # noqa: PLW2901
                assert our.shape == their.shape
                assert mx.array_equal(our, their).item()
                compared += 1
    assert compared >= 3 * len(layout.caches)


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
@pytest.mark.parametrize("length", [200, 30])
def test_b65_window_state_survives_past_and_below_the_window(model, length):
    """Restored rows continue exactly as canonical rows of the origin do."""
    layout = probe(model).layout
    batch = Batch(model, CHUNK, lambda: make_caches(model, None))
    uid = insert(batch, prompt_of(length + 1, seed=1))
    captured, done = Captured(layout), 0
    while done < length:
        batch.step()
        live = batch.live(uid)
        captured.take(live, [(a, a + 8) for a in range(done, live.held - 7, 8)])
        tail = done + (live.held - done) // 8 * 8
        captured.take(live, [(tail, live.held)])
        done = live.held
    window = min(length, layout.max_window)
    for cache in captured.restore():
        assert cache.offset == length
        expected = window if hasattr(cache, "max_size") else length
        assert cache.keys.shape[2] == expected


def test_b44_missing_blob_is_refused(model_dir):
    model = load_model(model_dir("qwen3_5"))[0]
    layout = probe(model).layout
    assembly = Assembly(layout, 8)
    kv = layout.blob(BlobClass.KV, 8)
    assembly.add(
        BlobClass.KV, 0, 8, memoryview(kv.header + bytes(kv.size - len(kv.header)))
    )
    with pytest.raises(ArithmeticMismatchError):
        assembly.caches()


def test_b90_foreign_header_is_refused(model_dir):
    layout = probe(load_model(model_dir("llama"))[0]).layout
    kv = layout.blob(BlobClass.KV, 8)
    blob = bytearray(kv.header + bytes(kv.size - len(kv.header)))
    blob[20] ^= 1
    with pytest.raises(TensorHeaderError):
        Assembly(layout, 8).add(BlobClass.KV, 0, 8, memoryview(blob))
    short = memoryview(kv.header + bytes(kv.size - len(kv.header) - 1))
    with pytest.raises(ArithmeticMismatchError):
        Assembly(layout, 8).add(BlobClass.KV, 0, 8, short)


def test_bfloat16_and_mixed_dtypes_round_trip(model_dir):
    model = load_model(model_dir("qwen3_5"))[0]
    model.set_dtype(mx.bfloat16)
    layout = probe(model).layout
    dtypes = {leaf.dtype for cache in layout.caches for leaf in cache.leaves}
    assert dtypes == {"BF16", "F32"}
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 6, 7, 8]]), cache=caches))
    segments, state = take(
        layout, caches, row=0, held=4, cuts=[(0, 3), (3, 4)], state=True
    )
    assembly = Assembly(layout, 4)
    for (start, end), group in zip([(0, 3), (3, 4)], segments, strict=True):
        blob = blobs_of(layout, group, end - start)[BlobClass.KV]
        assembly.add(BlobClass.KV, start, end, memoryview(blob))
    blob = blobs_of(layout, {BlobClass.STATE: state}, 1)[BlobClass.STATE]
    assembly.add(BlobClass.STATE, 3, 4, memoryview(blob))
    restored = assembly.caches()
    step = mx.array([[9]])
    live = model(step, cache=caches)
    assert mx.array_equal(live, model(step, cache=restored)).item()
