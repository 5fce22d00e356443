"""Compressed artifacts: the same state under the same names, in fewer bytes."""

import io
import random
import sys

import pytest

from kvport.manifest.codec import Codec
from kvport.manifest.errors import (
    ContainerError,
    DigestMismatchError,
    EncodedBlobError,
    KvportError,
    TensorHeaderError,
)
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import MIB
from kvport.snapshot.errors import (
    ArtifactGoneError,
    DamagedError,
    GoneError,
    LibraryMissingError,
)
from kvport.snapshot.transfer import exporter
from kvport.snapshot.transfer.archive import inspect_file, verify_file
from kvport.snapshot.transfer.codec import Encoder
from kvport.snapshot.transfer.exporter import reopen_export
from tests.transfer.test_exporter import damage
from tests.transfer.test_refusals import (
    codes_of,
    contents_of,
    pack,
    refuse,
    resigned,
    split,
)
from tests.transfer.world import ALL, DENSE, HYBRID, NOW, TOKENS, WINDOWED, Home

ODD = StateLayout(
    (
        CacheLayout(
            "0", CacheKind.KV, None,
            (LeafSpec("k", "BF16", (1, -1, 40)), LeafSpec("none", "F32", (1, -1, 0))),
        ),
        CacheLayout("1", CacheKind.ARRAYS, None, (LeafSpec("s", "I64", (1, 0)),)),
    )
)  # fmt: skip


@pytest.fixture
def a(home) -> Home:
    found = home("a")
    found.store(variant="smooth")
    return found


@pytest.fixture
def b(home, a) -> Home:
    found = home("b")
    found.trusted.append(a.key)
    return found


@pytest.fixture
def data(a) -> bytes:
    return a.export(compress=True)


def blobs_of(manifest):
    return [b for p in (*manifest.segments, *manifest.points) for b in p.blobs]


def reopen(home: Home, artifact):
    arguments = home.reopening()
    return reopen_export(home.cache, home.ledger, artifact, **arguments)


# There and back.


@pytest.mark.parametrize("layout", [DENSE, WINDOWED, HYBRID, ALL, ODD])
@pytest.mark.parametrize("step", [1 << 20, 700, 1])
def test_it_restores_the_exporters_path(home, layout, step):
    a, b = home("a", layout=layout), home("b", layout=layout)
    b.trusted.append(a.key)
    tip = a.store(variant="smooth")
    opened = a.open_export(compress=True)
    data = b"".join(opened.stream())
    assert len(data) == opened.size
    assert Codec.SHUFFLE_ZSTD in {blob.codec for blob in blobs_of(opened.manifest)}

    assert b.take(data, step=step).restored_tokens == 11

    here, there = a.cache.path(a.ns, tip), b.match().nodes
    assert here == there
    assert a.contents(here) == b.contents(there)


def test_digests_and_sizes_are_those_of_the_plain_export(a):
    plain, compressed = a.open_export(), a.open_export(compress=True)
    pairs = zip(blobs_of(plain.manifest), blobs_of(compressed.manifest), strict=True)
    for one, other in pairs:
        assert (one.blob_class, one.digest, one.size) == (
            other.blob_class, other.digest, other.size,
        )  # fmt: skip
        assert one.codec is Codec.NONE
        assert other.encoded_size <= one.encoded_size == one.size
    plain.close()
    compressed.close()


def test_entries_are_named_by_the_plain_digest(a, data):
    names = [part.name for part in split(data)]
    assert names == [part.name for part in split(a.export())]


def test_a_blob_that_is_not_smaller_goes_as_it_is(home):
    # Of a header without repetitions, and one byte, a frame is no smaller.
    leaf = LeafSpec("k", "U8", (-1, 1))
    tiny = home(
        "tiny", layout=StateLayout((CacheLayout("0", CacheKind.KV, None, (leaf,)),))
    )
    tiny.store(TOKENS, [1], kinds={})
    opened = tiny.open_export(compress=True)
    assert [blob.codec for blob in blobs_of(opened.manifest)] == [Codec.NONE]
    opened.close()


def test_plain_and_compressed_are_one_path(a, b, data):
    b.take(a.export())
    before = b.state()["files"]
    result = b.take(data)
    assert (result.admitted_segments, result.present_segments) == (0, 4)
    assert b.state()["files"] == before


def test_it_is_inspected_and_verified_offline(a, b, data):
    found = inspect_file(io.BytesIO(data))
    verified = verify_file(io.BytesIO(data), trust=b.trust(), now=NOW)
    assert verified.artifact_id == found.artifact_id
    assert verified.size == len(data)


def test_it_is_deterministic(a):
    opened = a.open_export(compress=True)
    opened.keep(a.ledger, NOW)
    first = b"".join(opened.stream())
    assert b"".join(reopen(a, opened.artifact_id).stream()) == first


# Kept, damaged, gone.


def test_a_kept_one_of_another_encoder_is_gone(a, monkeypatch):
    opened, plain = a.open_export(compress=True), a.open_export()
    for one in (opened, plain):
        one.keep(a.ledger, NOW)
        one.close()
    monkeypatch.setattr(exporter, "ENCODER", "zstd 9.9.9")
    with pytest.raises(ArtifactGoneError):
        reopen(a, opened.artifact_id)
    assert a.cache.stats().leases == 0
    reopen(a, plain.artifact_id).close()


def test_a_blob_that_comes_out_otherwise_ends_the_stream(a, b, monkeypatch):
    opened = a.open_export(compress=True)
    finish = Encoder.finish
    monkeypatch.setattr(Encoder, "finish", lambda self: finish(self) + b"x")
    sent = []
    with pytest.raises(GoneError):
        sent.extend(opened.stream())
    with pytest.raises(ContainerError):
        b.take(b"".join(sent))
    assert a.cache.stats().leases == 0


def test_damage_is_found_before_the_first_byte(a):
    damage(a, a.match().nodes[2], BlobClass.KV)
    with pytest.raises(DamagedError):
        a.open_export(compress=True)
    assert (a.cache.stats().total.damaged, a.cache.stats().leases) == (1, 0)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_blob_damaged_after_that_never_leaves_whole(home, smooth):
    leaf = LeafSpec("k", "F32", (1, 8, -1, 64))
    wide = StateLayout((CacheLayout("0", CacheKind.KV, None, (leaf,)),))
    a, b = (home(n, layout=wide, block_size=2048) for n in "ab")
    b.trusted.append(a.key)
    tokens = list(range(2048))
    a.store(tokens, [2048], kinds={}, variant="smooth" if smooth else "")
    opened = a.open_export(tokens, compress=True)
    damage(a, a.match(tokens).nodes[0], BlobClass.KV)
    sent = []
    with pytest.raises(DamagedError):
        sent.extend(opened.stream())
    assert sum(map(len, sent)) < opened.size - 1024
    assert max(map(len, sent)) <= 2 * MIB
    with pytest.raises(ContainerError):
        b.take(b"".join(sent))


# Refused.


def test_one_flipped_bit_anywhere(home):
    a, b = home("a"), home("b")
    b.trusted.append(a.key)
    tokens = [50, 51, 52, 53, 54]
    a.store(tokens, (4, 5), kinds={5: {PointKind.PROMPT}}, variant="smooth")
    data = a.export(tokens, compress=True)
    parts = split(data)
    rng = random.Random(3612)
    places = rng.sample(range(len(data) * 8), 300)
    # In each header, content and padding.
    for part in parts:
        places += [8 * (part.header + 130), 8 * part.start + 1, 8 * part.end - 3]
        if part.next > part.end:
            places.append(8 * part.end)
    before = b.state()
    for place in places:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(KvportError) as caught:
            b.take(bytes(flipped))
        expected = codes_of(parts, place // 8)
        if "digest_mismatch" in expected:
            expected |= {"blob_encoding"}
        assert caught.value.code in expected, place
    assert b.state() == before
    assert b.take(data).restored_tokens == 5


def test_truncation_at_any_part(b, data):
    before = b.state()
    for part in split(data):
        for length in (part.header, part.start, part.start + 1, part.end - 1):
            with pytest.raises(ContainerError):
                b.take(data[:length])
    assert b.state() == before


def _signed(a: Home, data: bytes, index: int, content: bytes) -> bytes:
    """The container with another content of an entry, its encoded size signed again."""
    contents = contents_of(data)
    name, _ = contents[index]
    contents[index] = (name, content)
    value = inspect_file(io.BytesIO(data)).manifest.to_json()
    for part in (*value["segments"], *value["points"]):
        for blob in part["blobs"]:
            if blob["digest"].endswith(name[-64:]):
                blob["encoded_size"] = len(content)
    fields = {"segments": value["segments"], "points": value["points"]}
    return resigned(a, pack(contents), **fields)


@pytest.mark.parametrize(
    "change",
    [lambda c: c + b"\0", lambda c: c[:-1], lambda c: c[4:], lambda c: b"\0" * len(c)],
)
def test_a_signed_blob_that_is_no_frame(a, b, data, change):
    content = contents_of(data)[4][1]
    edited = _signed(a, data, 4, change(content))
    assert isinstance(refuse(b, edited), EncodedBlobError)


@pytest.mark.parametrize(
    ("at", "expected"), [(9, TensorHeaderError), (-1, DigestMismatchError)]
)
def test_a_signed_frame_of_another_blob(a, b, data, at, expected):
    entry = split(data)[4]
    node = a.match().nodes[0]
    blob = a.contents([node])[0]
    assert entry.name.endswith(node.blobs[0].digest.hex())
    changed = bytearray(blob)
    changed[at] ^= 1
    encoder = Encoder(a.ns.layout.blob(BlobClass.KV, 4))
    content = b"".join([*encoder.feed(bytes(changed)), encoder.finish()])
    assert isinstance(refuse(b, _signed(a, data, 4, content)), expected)


def test_swapped_blobs(b, data):
    contents = contents_of(data)
    (first, one), (second, other) = contents[4], contents[5]
    contents[4], contents[5] = (first, other), (second, one)
    error = refuse(b, pack(contents))
    assert isinstance(error, (ContainerError, DigestMismatchError))


def test_a_plain_blob_where_an_encoded_one_was_signed(a, b, data):
    contents, plain = contents_of(data), contents_of(a.export())
    contents[4] = plain[4]
    assert isinstance(refuse(b, pack(contents)), ContainerError)


def test_without_the_library_what_is_compressed_is_not_read(pair, monkeypatch):
    a, b = pair
    plain, compressed = a.export(), a.export(compress=True)
    monkeypatch.setitem(sys.modules, "kvport.snapshot.transfer.codec", None)
    trust = b.trust()
    assert verify_file(io.BytesIO(plain), trust=trust, now=NOW)
    with pytest.raises(LibraryMissingError):
        verify_file(io.BytesIO(compressed), trust=trust, now=NOW)
