"""Prompt caches as mlx-lm makes them, and a home to convert them with."""

import contextlib
import io
import json
import struct
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.utils import load_model

from kvport.snapshot.convert import unwrap, wrap
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.prompts import Prompt
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import make_caches
from kvport.snapshot.state.prompt_cache_writer import Form
from kvport.snapshot.workbench import Workbench

CHUNK = 100


def tokens_of(length: int) -> list[int]:
    return [(11 * i) % 290 + 1 for i in range(length)]


def split(data: bytes) -> tuple[dict, bytes]:
    """(header, data) of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def older_state(cache):
    """`state` as mlx-lm 0.31 had it."""
    if isinstance(cache, CacheList):
        return [older_state(member) for member in cache.caches]
    if isinstance(cache, ArraysCache):
        return cache.cache
    if isinstance(cache, QuantizedKVCache):
        return tuple(
            tuple(part[..., : cache.offset, :] for part in side)
            for side in (cache.keys, cache.values)
        )
    cut = slice(None, cache.offset)
    return cache.keys[..., cut, :], cache.values[..., cut, :]


def older_numbers(cache):
    """`meta_state` as mlx-lm 0.31 had it."""
    match cache:
        case CacheList():
            names = [type(member).__name__ for member in cache.caches]
            return names, [older_numbers(member) for member in cache.caches]
        case RotatingKVCache():
            found = (cache.keep, cache.max_size, cache.offset, cache._idx)
        case QuantizedKVCache():
            found = (cache.offset, cache.group_size, cache.bits)
        case ChunkedKVCache():
            found = (cache.chunk_size, cache.start_position)
        case _:
            return ""
    return tuple(map(str, found))


def save_older(path: Path, caches) -> None:
    """`save_prompt_cache` of mlx-lm 0.31."""
    states = dict(tree_flatten([older_state(cache) for cache in caches]))
    classes = [type(cache).__name__ for cache in caches]
    beside = [[older_numbers(cache) for cache in caches], {"model": "m"}, classes]
    mx.save_safetensors(str(path), states, dict(tree_flatten(beside)))


class Bench:
    """One model, in plain mlx-lm and on a workbench."""

    def __init__(
        self, directory: Path, work: Path, home: Path, kv_form: KvForm | None
    ) -> None:
        self.directory, self.work, self.home = directory, work, home
        self.kv_form = kv_form
        self.module = load_model(directory)[0]

    def fill(self, length: int, decoded: int = 0):
        """Caches of plain mlx-lm that hold `length` tokens, the last ones decoded."""
        caches, tokens = make_caches(self.module, self.kv_form), tokens_of(length)
        steps = [*range(0, length - decoded, CHUNK), *range(length - decoded, length)]
        for a, b in zip(steps, [*steps[1:], length], strict=True):
            mx.eval(self.module(mx.array([tokens[a:b]]), cache=caches))
        return caches

    def save(self, caches, form=Form.NEWER) -> Path:
        path = self.new("safetensors")
        if form is Form.NEWER:
            save_prompt_cache(str(path), caches, {"model": "m", "1": "x", "2.x": ""})
        else:
            save_older(path, caches)
        return path

    def continued(self, caches, steps=20):
        """Greedy tokens and log-probabilities; the first step is a short chunk."""
        step, rows, tokens = [5, 6, 7], [], []
        for _ in range(steps):
            rows.append(self.module(mx.array([step]), cache=caches)[0, -1])
            tokens.append(mx.argmax(rows[-1]).item())
            step = tokens[-1:]
        return mx.stack(rows)

    @contextlib.contextmanager
    def workbench(self, **options):
        work = Path(tempfile.mkdtemp(dir=self.work))
        source = str(self.directory)
        options = {"home": self.home, "kv_form": self.kv_form, **options}
        with Workbench.open(source, work=work, **options) as opened:
            yield opened

    def wrap(self, path: Path, prompt, **options) -> bytes:
        to = io.BytesIO()
        with path.open("rb") as file, self.workbench(**options) as opened:
            self.done = wrap(opened, file, Prompt(tokens=prompt), to)
        return to.getvalue()

    def unwrap(self, artifact: bytes, form=Form.NEWER, **options) -> Path:
        path = self.new("safetensors")
        with path.open("wb") as to, self.workbench(**options) as opened:
            self.done = unwrap(opened, io.BytesIO(artifact), form, to)
        return path

    def load(self, path: Path):
        return load_prompt_cache(str(path))

    def new(self, suffix: str) -> Path:
        return Path(tempfile.mkdtemp(dir=self.work)) / f"file.{suffix}"


@pytest.fixture
def bench(tmp_path, model_dir):
    def make(arch="llama", kv_form=None, **options) -> Bench:
        home = tmp_path / "home"
        Keyring(home).create()
        directory = model_dir(arch, **options)
        return Bench(directory, tmp_path, home, kv_form)

    return make
