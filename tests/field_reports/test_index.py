"""Public bugs of other caches that concern what an entry is, and how it is named."""

import subprocess
import sys

import attrs
import mlx.core as mx
import pytest

from kvport.manifest.errors import ArithmeticMismatchError
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.errors import ForeignRootError
from kvport.snapshot.node import Node, NodeSettings
from kvport.snapshot.state.blobs import Assembly, to_buffers
from tests.cache.builder import (
    DENSE,
    blob_files,
    open_cache,
    space,
    store,
    with_tokens,
)

TOKENS = list(range(600))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 7, 3), mx.float16), ((1, 1, 8, 3), mx.float16), ((1, 2, 8, 3), mx.int8)],
    ids=["a row less", "a head of two", "another dtype"],
)
def test_b68_less_bytes_than_the_geometry_has_are_an_error_when_stored(shape, dtype):
    whole = {(0, 0): mx.zeros((1, 2, 8, 3), dtype=mx.float16)}
    blob = b"".join(to_buffers(DENSE, BlobClass.KV, 8, whole))
    assert len(blob) == DENSE.blob(BlobClass.KV, 8).size
    with pytest.raises(ArithmeticMismatchError):
        to_buffers(DENSE, BlobClass.KV, 8, {(0, 0): mx.zeros(shape, dtype=dtype)})
    # And what was stored short by others is not taken for a state.
    with pytest.raises(ArithmeticMismatchError):
        Assembly(DENSE, 8).add(BlobClass.KV, 0, 8, memoryview(blob[:-6]))


def test_b70_another_process_with_another_hash_seed_finds_what_was_stored(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from tests.cache.builder import *\n"
        "with open_cache(pathlib.Path(sys.argv[1])) as cache:\n"
        "    print(position(cache, space(cache), list(range(600))))\n"
    )
    with open_cache(tmp_path / "cache") as cache:
        store(cache, space(cache), TOKENS, [256, 512])
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "cache")],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "512\n"


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"\1" * 32},
        {"parent": NodeId(b"\1" * 32)},
        {"id": NodeId(b"\1" * 32)},
        {"blobs": ()},
        {"tokens": b"\0" * 8},
        {"end": 511},
    ],
    ids=lambda change: next(iter(change)),
)
def test_b83_a_record_that_contradicts_itself_is_caught_when_written(tmp_path, change):
    with open_cache(tmp_path / "a") as cache:
        ns = space(cache)
        tip = store(cache, ns, TOKENS, [256, 512], kinds={512: {PointKind.REPLY}})
        nodes = with_tokens(cache.path(ns, tip), encode_tokens(TOKENS))
        blobs = {ref.digest: cache.read(ns, ref) for n in nodes for ref in n.blobs}
    nodes[1] = attrs.evolve(nodes[1], **change)
    with open_cache(tmp_path / "b") as cache:
        ns = space(cache)
        directory = cache.staging("upload")
        staged = {digest: directory / digest.hex() for digest in blobs}
        for digest, data in blobs.items():
            staged[digest].write_bytes(data)
        with cache.reserve(1 << 20) as room, pytest.raises(ValueError, match="a node"):
            cache.admit(ns, nodes, staged, room)
        assert not blob_files(tmp_path / "b")
        assert not cache.stats().namespaces[0].nodes


def test_a_node_holds_its_cache_to_the_key_of_its_home(tmp_path):
    """Another home, or this one without its keys, does not take it for its own."""
    root = tmp_path / "cache"
    homes = [
        NodeSettings(home=tmp_path / name, cache_root=root, free_floor=0)
        for name in "ab"
    ]
    Node.open(homes[0]).close()
    with pytest.raises(ForeignRootError):
        Node.open(homes[1])
    with pytest.raises(ForeignRootError):
        open_cache(root)
    Node.open(homes[0]).close()
    (tmp_path / "a" / "keys" / "cache.key").unlink()
    with pytest.raises(ForeignRootError):
        Node.open(homes[0])
