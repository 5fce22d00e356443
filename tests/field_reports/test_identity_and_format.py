"""Reports about state of another model or setting, and about files misread.

B43: engine/test_capture.py. B45, B52, B53 below the engine: state/test_probe.py.
"""

import contextlib
import json
import struct

import attrs
import mlx.core as mx
import numpy as np
import pytest

from kvport.manifest.errors import BindingMismatchError, KvportError
from kvport.manifest.layout import BlobClass, CacheKind
from kvport.manifest.limits import MIB
from kvport.manifest.model import Manifest
from kvport.snapshot.engine import local_identity
from kvport.snapshot.state.kinds import KIND_OF_TYPE
from kvport.snapshot.state.kv_form import Quantisation
from tests.cache.builder import check_account, open_cache
from tests.field_reports.restoring import carry, exporting, restored_caches
from tests.field_reports.toys import KeysOnly, SideState

SMALL = {"chunk": 64, "stride": 64, "block": 64}
FULL = {"max_tokens": 8, "full_logprobs": True}
QUANTISATIONS = [None, Quantisation(8, 32), Quantisation(4, 32), Quantisation(8, 64)]


def test_b38_state_of_other_layers_is_invisible_and_goes(rig, prompt, model_dir):
    """One name, more layers after an update; two requests at once on the old cache."""
    tokens = prompt(300)
    r = rig(model_dir("llama", layers=2, kv_bytes_per_token=4096), **SMALL)
    r.complete(tokens)
    stale, old = r.namespace.id, r.engine.model("m").identity
    r.close()
    r = rig(model_dir("llama", layers=4, kv_bytes_per_token=4096), **SMALL)
    new = r.engine.model("m").identity
    assert set(new.mismatched_fields(old)) == {"model_files", "layout"}
    both = [r.start(tokens), r.start(prompt(50, seed=1))]
    assert [one.answer().restored for one in both] == [0, 0]
    nodes = {space.id: space.nodes for space in r.cache.stats().namespaces}
    assert set(nodes) == {stale, r.namespace.id}
    assert nodes[stale] > 0
    r.close()

    removed = []
    with (
        open_cache(r.cache_root, 8 * MIB, removed) as cache,
        contextlib.ExitStack() as held,
    ):
        check_account(cache, r.cache_root)
        while not removed:
            held.enter_context(cache.reserve(MIB // 8))
        assert {one.namespace for one in removed} == {stale}, "it makes room first"


def test_b42_state_of_other_code_or_settings_is_never_loaded(
    rig, prompt, model_dir, monkeypatch
):
    """Written with 8-bit keys and values; read without, and by another version."""
    directory = model_dir("llama", kv_bytes_per_token=4096)
    quantised = {"kv_form": Quantisation(8, 32), **SMALL}
    tokens = prompt(300)
    r = rig(directory, **quantised)
    r.complete(tokens)
    written = r.engine.model("m").identity
    r.close()

    r = rig(directory, **SMALL)
    assert r.complete(tokens).restored == 0
    found = r.engine.model("m").identity
    assert found.mismatched_fields(written) == ("kv", "layout")
    assert r.engine.counts["m"].misses == 1
    r.close()

    with monkeypatch.context() as patch:
        patch.setattr(local_identity, "version", lambda _: "99.0")
        r = rig(directory, **quantised)
        assert r.complete(tokens).restored == 0
        found = r.engine.model("m").identity
        assert found.mismatched_fields(written) == ("mlx_lm",)
        r.close()

    later = attrs.evolve(written, state_format=written.state_format + 1)
    assert later.mismatched_fields(written) == ("state_format",)
    assert later.digest != written.digest
    r = rig(directory, **quantised)
    assert r.complete(tokens).restored == 299


def test_b45_a_model_with_state_beside_its_caches_is_served_without(
    rig, prompt, toy_dir
):
    """What a record cannot carry (a rope delta, a counter) is never left out of it."""
    r = rig(toy_dir(SideState))
    assert "beside its caches" in r.engine.model("m").refusal
    assert r.engine.store("m") is None
    for _ in range(2):
        answer = r.complete(prompt(40))
        assert (answer.restored, len(answer.tokens)) == (0, 4)


def rename(value, where, new):
    *path, last = where
    for step in path:
        value = value[step]
    value[last] = new


@pytest.mark.parametrize(
    ("where", "new"),
    [
        (("format_version",), 2),
        (("ring_index",), [7]),
        (("identity", "rope_delta"), 3),
        (("identity", "layout", 0, "kind"), "kv2"),
        (("identity", "layout", 0, "leaves", 0, "offset"), 0),
    ],
)
def test_b46_a_newer_format_cannot_be_read_as_an_older_one(
    rig, prompt, tmp_path, where, new
):
    """A reader of today meets a file with what it does not know: it must fail."""
    tokens = prompt(100)
    r = rig("qwen3_5", **SMALL)
    r.complete(tokens)
    with exporting(r, tokens, tmp_path) as opened:
        value = opened.manifest.to_json()
    assert Manifest.from_json(value) == opened.manifest
    rename(value, where, new)
    with pytest.raises(KvportError):
        Manifest.from_json(value)


def test_b46_blobs_have_no_free_metadata(rig, prompt):
    """No place in a blob where something could be written that readers pass over."""
    r = rig("qwen3_5", **SMALL)
    r.complete(prompt(100))
    r.close()
    files = list(r.cache_root.glob("ns/*/*"))
    assert files
    for path in files:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        assert {frozenset(value) for value in header.values()} == {
            frozenset(["dtype", "shape", "data_offsets"])
        }


def test_b52_every_kind_comes_back_whole_and_masks(rig, prompt, model_dir):
    """Chunked, recurrent, windowed, quantised, listed: saved, loaded, a mask built."""
    tokens = prompt(150)
    quantised = {
        "model": model_dir("llama", kv_bytes_per_token=4096),
        "kv_form": Quantisation(8, 32),
    }
    cases = [{"model": arch} for arch in ("llama4", "qwen3_5", "baichuan_m1")]
    seen = set()
    for number, case in enumerate([*cases, quantised]):
        options = {"home": str(number), **SMALL, **case}
        r = rig(**options)
        live = r.complete(tokens, **FULL)
        r.close()
        r = rig(**options)
        position, caches = restored_caches(r, tokens)
        assert position == 149
        for cache in caches:
            seen.add(KIND_OF_TYPE[type(cache)])
            if KIND_OF_TYPE[type(cache)] is CacheKind.ARRAYS:
                assert cache.make_mask(3) is None
            elif hasattr(cache, "make_mask"):  # llama4 masks chunks by itself
                mask = cache.make_mask(3, window_size=None, return_array=True)
                assert mask.shape[-2] == 3
        warm = r.complete(tokens, **FULL)
        assert warm.restored == 149
        assert np.abs(warm.logprobs - live.logprobs).max() < 1e-4
    assert seen == set(CacheKind), "every kind of the registry is carried here"


def test_b53_b66_keys_without_values_are_saved_and_restored(rig, prompt, toy_dir):
    """A cache with an array of size 0: saving works, and so does the same setting."""
    tokens = prompt(200)
    directory = toy_dir(KeysOnly)
    r = rig(directory, **SMALL)
    assert r.engine.model("m").refusal is None
    shapes = [leaf.shape for leaf in r.engine.model("m").layout.caches[-1].leaves]
    assert 0 in shapes[1]
    live = r.complete(tokens, **FULL)
    r.close()
    r = rig(directory, **SMALL)
    warm = r.complete(tokens, **FULL)
    assert warm.restored == 199
    assert np.array_equal(warm.logprobs, live.logprobs)
    (cache,) = restored_caches(r, tokens)[1][-1:]
    assert cache.keys.shape[2] == 199
    assert mx.allclose(cache.keys[0, 0, :, 0], mx.array(tokens[:199]) / 300).item()


def test_b63_every_transform_of_the_bytes_is_compared(rig, prompt, model_dir, tmp_path):
    """One cache directory, one model, all settings of quantised keys and values."""
    directory = model_dir("llama", kv_bytes_per_token=4096)
    tokens = prompt(100)
    identities = []
    for setting in QUANTISATIONS:
        r = rig(directory, kv_form=setting, **SMALL)
        assert r.complete(tokens, max_tokens=1).restored == 0, (
            "what others wrote is not seen"
        )
        identities.append(r.engine.model("m").identity)
        r.close()
    assert len({identity.digest for identity in identities}) == len(QUANTISATIONS)
    for setting in QUANTISATIONS:
        r = rig(directory, kv_form=setting, **SMALL)
        assert r.complete(tokens, max_tokens=1).restored == 99, "equal settings pass"
        r.close()
    here = rig(directory, kv_form=QUANTISATIONS[1], **SMALL)
    there = rig(directory, home="b", kv_form=QUANTISATIONS[2], **SMALL)
    with pytest.raises(BindingMismatchError, match="kv"):
        carry(here, there, tokens, tmp_path)
    assert there.match(tokens) is None


@pytest.mark.parametrize("arch", ["deepseek_v3", "deepseek_v32"])
def test_b66_equal_settings_pass_for_latent_caches(rig, prompt, tmp_path, arch):
    """Caches of another form than keys and values: what was saved is taken."""
    tokens = prompt(200)
    here, there = rig(arch, **SMALL), rig(arch, home="b", **SMALL)
    here.complete(tokens)
    hot = here.complete(tokens, **FULL)
    assert hot.restored == 199
    assert carry(here, there, tokens, tmp_path).restored_tokens >= 199
    answer = there.complete(tokens, **FULL)
    assert answer.restored == 199
    assert np.array_equal(answer.logprobs, hot.logprobs)
    assert here.engine.model("m").layout.blob_classes == (BlobClass.KV,)
