"""Files of strangers: what does not fit is refused with a code, and harms nobody."""

import io
import json
import random
import struct

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvport.manifest.errors import (
    BindingMismatchError,
    ContainerError,
    DigestMismatchError,
    KvportError,
    UntrustedKeyError,
)
from kvport.manifest.identity import Lineage, Provenance
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.engine.convert import store_caches
from kvport.snapshot.errors import (
    BadPromptError,
    KeyFileError,
    PromptCacheError,
    PromptCacheMismatchError,
    UnsupportedModelError,
)
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.state.kv_form import Limit, Quantisation
from kvport.snapshot.state.probe import probe
from kvport.snapshot.state.prompt_cache import read_prompt_cache
from kvport.snapshot.state.prompt_cache_writer import Form
from tests.convert.conftest import split, tokens_of
from tests.manifest.builder import KEY, NUMERICS, identity_of
from tests.state.toys import Toy

LENGTH = 60


def joined(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def saved(bench):
    """A whole file of each form for a model with full and windowed layers."""
    b = bench("gemma3_text")
    caches = b.fill(LENGTH, 2)
    files = {form: b.save(caches, form).read_bytes() for form in Form}
    return files, probe(b.module).layout


def put(header, path, value):
    *above, last = path
    for name in above:
        header = header[name]
    header[last] = value


def changed(*path, to):
    def edit(header, data):
        put(header, path, to)
        return header, data

    return edit


def duplicated(header, data):
    text = json.dumps(header)
    entry = json.dumps({"0.0": header["0.0"]})[1:-1]
    return (text[:-1] + "," + entry + "}").encode(), data


def overlapping(header, data):
    header["0.1"]["data_offsets"] = header["0.0"]["data_offsets"]
    return header, data


def without(name):
    def edit(header, data):
        del header[name]
        return header, data

    return edit


def floating(header, data):
    return json.dumps(header).replace("[1,", "[1.0,").replace("[1 ,", "[1.0,"), data


LIES = {
    "cut short": lambda h, d: (h, d[:-1]),
    "trailing bytes": lambda h, d: (h, d + b"\0"),
    "a duplicate key": duplicated,
    "tensors on the same bytes": overlapping,
    "a hole": without("0.0"),
    "an unknown field": lambda h, d: ({**h, "0.0": {**h["0.0"], "x": 1}}, d),
    "an unknown dtype": changed("0.0", "dtype", to="F64"),
    "another dtype": changed("0.0", "dtype", to="I32"),
    "a negative shape": changed("0.0", "shape", to=[1, -1, 60, 16]),
    "a shape of floats": changed("0.0", "shape", to=[1.0, 1, 60, 16]),
    "a shape that overflows": changed("0.0", "shape", to=[1 << 40, 1 << 40]),
    "an offset past the end": changed("0.0", "data_offsets", to=[0, 1 << 50]),
    "offsets of truth values": changed("0.0", "data_offsets", to=[False, True]),
    "no object": lambda h, d: ([h], d),
    "no JSON": lambda _, d: (b"{" * 100, d),
    "deep JSON": lambda _, d: (b'{"a":' + b"[" * 100_000, d),
    "no UTF-8": lambda _, d: (b'{"\xff":1}', d),
    "a path for a name": lambda h, d: ({**h, "../../x": h["0.0"]}, d),
    "no metadata": without("__metadata__"),
    "metadata of numbers": changed("__metadata__", "2.0", to=1),
    "metadata of lists": lambda h, d: ({**h, "__metadata__": []}, d),
    "an unknown class": changed("__metadata__", "1.0", to="LayerCache"),
    "a class of the system": changed("__metadata__", "1.0", to="mx.load"),
    "a class too many": changed("__metadata__", "1.6", to="KVCache"),
    "a class with members": changed("__metadata__", "1.0.0", to="KVCache"),
    "an empty index": changed("__metadata__", "1.", to="KVCache"),
    "a root without index": changed("__metadata__", "2", to=""),
    "a deep index": changed("__metadata__", "1" + ".0" * 50_000, to="KVCache"),
    "a number that is not there": changed("__metadata__", "2.1.0", to="9.9"),
    "a number of no type": changed("__metadata__", "2.1.1", to="float"),
    "a number as a text": changed("__metadata__", "2.1.1", to="string"),
    "a number as nothing": changed("__metadata__", "2.1.1", to="none"),
    "rows as a number": changed("__metadata__", "2.1.0", to="0.0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(saved, lie):
    files, layout = saved
    for form, whole in files.items():
        data = joined(*LIES[lie](*split(whole)))
        if form is Form.OLDER and lie in OF_THE_NEWER_FORM:
            continue
        with pytest.raises((PromptCacheError, PromptCacheMismatchError)):
            read_prompt_cache(io.BytesIO(data), layout)


OF_THE_NEWER_FORM = {lie for lie in LIES if "class" in lie or "number" in lie} | {
    "an empty index",
    "a root without index",
    "a deep index",
}


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 64, b"x" * 7, b"\2" + b"\0" * 7 + b"{}"]
)
def test_what_is_no_file_of_tensors_is_refused(saved, data):
    with pytest.raises(PromptCacheError):
        read_prompt_cache(io.BytesIO(data), saved[1])


@pytest.mark.parametrize("form", Form)
def test_no_change_of_the_header_does_more_than_be_refused(saved, form):
    """A flipped byte, or a cut: refused with a code, or read as what it then says."""
    files, layout = saved
    whole = files[form]
    (length,) = struct.unpack("<Q", whole[:8])
    rng = random.Random(form.value)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        at = rng.randrange(8 + length)
        data[at] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        try:
            read_prompt_cache(io.BytesIO(bytes(data)), layout)
        except KvportError:
            refused += 1
    assert refused > 200


# What the numbers of a cache say: keys, values, offset, keep, max_size, index.
NUMBERS = {
    "more tokens than rows": ("2.2", 10_000),
    "another offset": ("2.2", LENGTH - 1),
    "no tokens": ("2.2", 0),
    "fewer than none": ("2.2", -5),
    "a kept head": ("0.3", 4),
    "another window": ("0.4", 47),
    "an index past the ring": ("0.5", 400),
    "an index before it": ("0.5", -1),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_contradict_the_rows_are_refused(saved, case):
    files, layout = saved
    name, number = NUMBERS[case]
    header, data = split(files[Form.NEWER])
    start, end = header[name]["data_offsets"]
    data = data[:start] + struct.pack("<i", number) + data[end:]
    with pytest.raises((PromptCacheError, PromptCacheMismatchError)):
        read_prompt_cache(io.BytesIO(joined(header, data)), layout)


@pytest.mark.parametrize("text", ["", "-1", "1.0", "9" * 5000, "\uff10", "x"])
def test_numbers_of_the_older_form_are_plain(saved, text):
    files, layout = saved
    header, data = split(files[Form.OLDER])
    header["__metadata__"]["0.0.2"] = text
    with pytest.raises(PromptCacheError):
        read_prompt_cache(io.BytesIO(joined(header, data)), layout)


def test_caches_of_different_lengths_are_refused(bench):
    b = bench("llama")
    caches = b.fill(40)
    caches[1].offset = 39
    with pytest.raises(PromptCacheError, match="different numbers"):
        b.wrap(b.save(caches), tokens_of(40))


def test_another_model_is_named(bench):
    path = bench("llama").save(bench("llama").fill(40))
    for arch, named in (
        ("gemma3_text", "cache 0 is a KVCache"),
        ("gemma3n", "the file has 4 caches, not the model's 2"),
        ("mamba2", "cache 0 is a KVCache where the model has a ArraysCache"),
        ("qwen3_5", "cache 0 is a KVCache"),
    ):
        with pytest.raises(PromptCacheMismatchError, match=named):
            bench(arch, layers=4).wrap(path, tokens_of(40))
    with pytest.raises(PromptCacheMismatchError, match="cache 0 is not the model's"):
        bench("llama", kv_bytes_per_token=4096, layers=4).wrap(path, tokens_of(40))


@pytest.mark.parametrize(
    ("kv_form", "other", "named"),
    [
        (None, Limit(48), "KVCache where the model has a RotatingKVCache"),
        (Limit(48), None, "RotatingKVCache where the model has a KVCache"),
        (Limit(48), Limit(47), "window is 48, the model's is 47"),
        (Quantisation(8, 32), Quantisation(4, 32), "bits is 8, the model's is 4"),
    ],
)
def test_another_form_of_keys_and_values_is_named(bench, kv_form, other, named):
    sized = {"kv_bytes_per_token": 4096}
    b = bench("llama", kv_form, **sized)
    path = b.save(b.fill(40))
    with pytest.raises(PromptCacheMismatchError, match=named):
        bench("llama", other, **sized).wrap(path, tokens_of(40))


def test_a_prompt_shorter_than_the_state_is_refused(bench):
    b = bench("llama")
    path = b.save(b.fill(40))
    with pytest.raises(PromptCacheMismatchError, match="40 tokens, the prompt has 39"):
        b.wrap(path, tokens_of(39))


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_another_prompt_is_noticed(bench, arch):
    """Nothing in the file names its prompt: signing another one would be a lie."""
    b = bench(arch)
    path = b.save(b.fill(200, decoded=9))
    other = [(7 * token) % 290 + 1 for token in tokens_of(200)]
    for wrong in (other, [1, *tokens_of(200)[:-1]], [*tokens_of(199), 3]):
        with pytest.raises(PromptCacheMismatchError, match="not that of this prompt"):
            b.wrap(path, wrong)
    b.wrap(path, tokens_of(200))


def test_a_prompt_of_another_length_is_noticed_where_tokens_are_not_counted(bench):
    b = bench("mamba2")
    path = b.save(b.fill(200))
    for length in (194, 199, 201, 219):
        with pytest.raises(PromptCacheMismatchError, match="not that of this prompt"):
            b.wrap(path, tokens_of(length))


@pytest.mark.parametrize("tokens", [[], [-1], [10**9]])
def test_a_prompt_that_the_model_cannot_have_is_refused(bench, tokens):
    b = bench("llama")
    path = b.save(b.fill(1))
    with pytest.raises(BadPromptError):
        b.wrap(path, tokens)


def test_an_unset_cache_is_refused(bench):
    b = bench("llama")
    caches = b.fill(40)
    caches[2] = KVCache()
    with pytest.raises(PromptCacheMismatchError):
        b.wrap(b.save(caches), tokens_of(40))


def test_an_artifact_is_refused_as_an_import_refuses_it(bench, tmp_path):
    b = bench("llama")
    artifact = b.wrap(b.save(b.fill(40)), tokens_of(40))
    flipped = bytearray(artifact)
    flipped[len(artifact) // 2] ^= 1
    with pytest.raises(DigestMismatchError):
        b.unwrap(bytes(flipped))
    with pytest.raises(ContainerError):
        b.unwrap(artifact[:-1])
    with pytest.raises(BindingMismatchError):
        bench("qwen3").unwrap(artifact)
    with pytest.raises(BindingMismatchError):
        b.unwrap(artifact, block_size=128)
    stranger = tmp_path / "stranger"
    Keyring(stranger).create()
    with pytest.raises(UntrustedKeyError):
        b.unwrap(artifact, home=stranger)


def test_without_a_key_or_a_fitting_model_nothing_begins(bench, tmp_path):
    with pytest.raises(KeyFileError), bench().workbench(home=tmp_path / "none"):
        pass
    with pytest.raises(UnsupportedModelError), bench("mamba2", Limit(48)).workbench():
        pass


def test_rows_that_a_smaller_window_dropped_are_missed(tmp_path):
    """Segments of the larger window would have them; nothing is made up instead."""
    toy = Toy(lambda: [RotatingKVCache(8), RotatingKVCache(40)])
    caches, layout = toy.make_cache(), probe(toy).layout
    mx.eval(toy(mx.array([tokens_of(30)]), cache=caches))
    said = Provenance(Lineage.DERIVED, NUMERICS, frozenset({KEY.public.key_id}))
    root = tmp_path / "cache"
    with Cache.open(Opening(root=root, free_floor=0)) as cache:
        namespace = cache.namespace(identity_of(layout), "default", 16)
        store_caches(cache, namespace, caches, tokens_of(30), said)
        for token in tokens_of(60)[30:]:
            mx.eval(toy(mx.array([[token]]), cache=caches))
        with pytest.raises(PromptCacheMismatchError, match="cache 0 has dropped rows"):
            store_caches(cache, namespace, caches, tokens_of(60), said)


def test_nothing_of_a_home_is_used_but_its_keys(bench):
    """A server may run on it meanwhile."""
    b = bench("llama")
    b.wrap(b.save(b.fill(40)), tokens_of(40))
    found = {path.name for path in b.home.iterdir()}
    assert found == {"keys", "trust.json", "model-digests.json"}
