"""Exports beside eviction and damage, cut ends, kept exports, and why there is none."""

import contextlib
import zlib

import numpy as np
import pytest

from kvport.manifest.errors import ContainerError
from kvport.manifest.identity import Lineage, PointKind
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.manifest.ustar import TRAILER, padding
from kvport.snapshot.cache.policy import NamespaceSettings, Tier
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.errors import (
    ArtifactGoneError,
    ArtifactUnknownError,
    DamagedError,
    EvictedError,
    GoneError,
    NeverComputedError,
    NotRestorableError,
    StorageError,
    TierError,
    WriteBudgetError,
)
from kvport.snapshot.transfer.exporter import reopen_export
from kvport.snapshot.transfer.issue import LIFETIME, Issue
from tests.cache.builder import Time
from tests.transfer.world import DENSE, HYBRID, KINDS, NOW, NUMERICS, TOKENS

BIG = 8192  # tokens of 28 bytes in a segment of the tests that fill a cache
FIRST = [0, *range(1000, 1000 + BIG - 1)]


def fill(home) -> None:
    """Store prefixes that share nothing, of more than the 6 MiB of a small cache."""
    for number in range(1, 40):
        home.store([number, *FIRST[1:]], [BIG], kinds={})


def damage(home, node, blob_class: BlobClass) -> None:
    ref = node.blob(blob_class)
    path = home.directory / "cache" / "ns" / home.ns.id / ref.digest.hex()
    data = bytearray(path.read_bytes())
    data[ref.size - 1] ^= 1
    path.write_bytes(data)


# Eviction and damage.


def test_eviction_passes_an_open_export_by(home):
    a, b = home("a", layout=DENSE, block_size=BIG, cap=6 * MIB), home("b")
    a.store(FIRST, [BIG], kinds={})
    opened = a.open_export(FIRST)
    pieces = opened.stream()
    data = next(pieces)
    fill(a)
    assert a.cache.stats().total.removed  # others went
    data += b"".join(pieces)
    b.trusted.append(a.key)
    space = b.cache.namespace(a.ns.identity, "default", BIG)
    b.ns, b.models = (
        space,
        [type(b.models[0])("m", a.models[0].tokenizer_digest, space)],
    )
    assert b.take(data).restored_tokens == BIG
    a.cache.reserve(4 * MIB).release()
    assert a.match(FIRST) is None  # and so did this, once it was not leased


def test_room_for_an_import_is_not_made_of_its_own_path(home):
    options = {"layout": DENSE, "block_size": BIG}
    a, b = home("a", **options), home("b", cap=8 * MIB, **options)
    b.trusted.append(a.key)
    tokens = list(range(10 * BIG))
    a.store(tokens, list(range(BIG, 11 * BIG, BIG)), kinds={})
    data = a.export(tokens)
    b.take(a.export(tokens[: 8 * BIG]))
    # Newer state fills the cache, until the path has begun to go.
    present, number = 8, 0
    while present == 8:
        number += 1
        b.store([number, *FIRST[1:]], [BIG], kinds={})
        present = b.cache.longest(b.ns, encode_tokens(tokens)) // BIG
    result = b.take(data)
    assert 0 < present < 8
    assert result.present_segments == present
    assert result.admitted_segments == 10 - present


def test_a_stream_that_is_dropped_ends_its_lease(home):
    a = home("a")
    a.store()
    pieces = a.open_export().stream()
    next(pieces)
    assert a.cache.stats().leases == 1
    pieces.close()
    assert a.cache.stats().leases == 0


def test_a_closed_export_gives_no_bytes(home):
    a = home("a")
    a.store()
    opened = a.open_export()
    opened.close()
    opened.close()
    with pytest.raises(GoneError):
        next(opened.stream())


def test_a_damaged_blob_ends_the_stream_and_is_gone(home):
    a, b = home("a"), home("b")
    b.trusted.append(a.key)
    a.store()
    damage(a, a.match().nodes[2], BlobClass.KV)
    sent: list[bytes] = []
    with pytest.raises(DamagedError):
        sent.extend(a.open_export().stream())
    assert sent
    with pytest.raises(ContainerError):
        b.take(b"".join(sent))
    assert b.match() is None
    stats = a.cache.stats()
    assert (stats.total.damaged, stats.leases) == (1, 0)
    with pytest.raises(EvictedError):
        a.open_export()


def test_a_large_damaged_blob_never_leaves_whole(home):
    leaf = LeafSpec("k", "F32", (1, 8, -1, 64))
    wide = StateLayout((CacheLayout("0", CacheKind.KV, None, (leaf,)),))
    a = home("a", layout=wide, block_size=2048)
    tokens = list(range(2048))
    a.store(tokens, [len(tokens)], kinds={})
    (node,) = a.match(tokens).nodes
    damage(a, node, BlobClass.KV)
    size = node.blobs[0].size
    opened = a.open_export(tokens)
    before = opened.size - len(TRAILER) - len(padding(size)) - size
    sent: list[bytes] = []
    with pytest.raises(DamagedError):
        sent.extend(opened.stream())
    assert MIB < sum(map(len, sent)) - before < size


# Ends inside a segment.


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 9])
def test_a_cut_end_holds_the_segments_first_rows(home, length):
    a, b = home("a", layout=DENSE), home("b", layout=DENSE)
    b.trusted.append(a.key)
    a.store(lineage=Lineage.COLD)
    whole = a.match().nodes
    asked = [*TOKENS[:length], 1, 2]

    result = b.take(a.export(asked))

    assert result.restored_tokens == length
    nodes = b.match(asked).nodes
    *before, cut = nodes
    assert tuple(n.id for n in before) == tuple(n.id for n in whole[: len(before)])
    original = whole[len(before)]
    assert cut.attestations == original.attestations
    rows, taken = original.end - original.start, cut.end - cut.start
    old, new = a.contents([original])[0], b.contents([cut])[0]
    layout = a.ns.layout
    pairs = zip(
        layout.blob(BlobClass.KV, rows).tensors,
        layout.blob(BlobClass.KV, taken).tensors,
        strict=True,
    )
    for was, now in pairs:
        found = _array(new, now)
        assert found.shape[2] == taken
        np.testing.assert_array_equal(found, _array(old, was)[:, :, :taken])


def _array(blob, tensor):
    data = blob[tensor.offset : tensor.offset + tensor.nbytes]
    width = {"F16": np.uint16, "F32": np.uint32}[tensor.dtype]
    return np.frombuffer(data, width).reshape(tensor.shape)


def test_a_cut_end_is_one_node_however_often_it_is_exported(home):
    a = home("a", layout=DENSE)
    a.store()
    asked = [*TOKENS[:7], 1]
    before = a.cache.stats().namespaces[0].nodes
    assert a.export(asked) != a.export(asked)  # nonces
    assert a.cache.stats().namespaces[0].nodes == before + 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (NamespaceSettings(tier=Tier.READ_ONLY), TierError),
        (NamespaceSettings(write_bytes_per_hour=1), WriteBudgetError),
    ],
)
def test_where_nothing_may_be_stored_an_export_has_whole_segments(
    home, settings, error
):
    a = home("a", layout=DENSE)
    a.store()
    a.cache.configure(a.ns.id, settings)
    with contextlib.closing(a.open_export([*TOKENS[:7], 1])) as opened:
        assert opened.restorable_tokens == 4
    with pytest.raises(error):
        a.open_export([*TOKENS[:3], 1])
    assert a.cache.stats().leases == 0


def test_rows_that_an_export_cuts_live_no_longer_than_their_segment(home):
    """Nor do they keep alive what is above them."""
    time = Time()
    a = home("a", layout=DENSE, clocks=time.clocks)
    chain = a.cache.chain(a.ns, ROOT_NODE, "test", ttl=60)
    for segment in a.segments():
        chain.append(segment)
    chain.close()
    asked = [*TOKENS[:7], 1]
    with contextlib.closing(a.open_export(asked)) as opened:
        assert opened.restorable_tokens == 7
    time.passes(59)
    assert a.match(asked).position == 7
    time.passes(60)
    assert a.match(asked) is None


def test_a_path_with_whole_layers_is_never_cut(home):
    a = home("a", layout=HYBRID)
    a.store(kinds={8: {PointKind.STRIDE}, **KINDS})
    opened = a.open_export([*TOKENS[:9], 1])
    assert opened.restorable_tokens == 8
    opened.close()


# Attestations and points.


def test_what_was_made_here_is_signed_before_what_was_brought(home):
    a, b = home("a"), home("b")
    b.trusted.append(a.key)
    a.store(lineage=Lineage.COLD)
    b.take(a.export())
    b.store(lineage=Lineage.DERIVED)  # the same bytes, computed here
    assert all(len(n.attestations) == 2 for n in b.match().nodes)
    opened = b.open_export()
    said = {s.provenance for s in opened.manifest.segments}
    assert {(p.lineage, p.origins) for p in said} == {
        (Lineage.DERIVED, frozenset({b.key_id}))
    }
    opened.close()


def test_cold_is_signed_before_derived(home):
    a = home("a")
    a.store(lineage=Lineage.DERIVED)
    a.store(lineage=Lineage.COLD)
    opened = a.open_export()
    assert {s.provenance.lineage for s in opened.manifest.segments} == {Lineage.COLD}
    assert {s.provenance.numerics for s in opened.manifest.segments} == {NUMERICS}
    opened.close()


def test_only_the_newest_points_are_signed_when_there_are_too_many(home):
    a = home("a", layout=DENSE)
    tokens, cuts = list(range(1100)), list(range(1, 1101))
    a.store(tokens, cuts, kinds={end: {PointKind.REPLY} for end in cuts})
    opened = a.open_export(tokens)
    positions = [point.position for point in opened.manifest.points]
    assert positions == list(range(77, 1101))
    opened.close()


# Kept exports.


def reopen(home, artifact, **other):
    arguments = home.reopening() | other
    return reopen_export(home.cache, home.ledger, artifact, **arguments)


def test_a_kept_export_gives_the_same_bytes_again(home):
    a = home("a")
    a.store()
    opened = a.open_export()
    opened.keep(a.ledger, NOW)
    first = b"".join(opened.stream())
    again = reopen(a, opened.artifact_id)
    assert again.describe() == opened.describe()
    assert b"".join(again.stream()) == first
    assert a.cache.stats().leases == 0


@pytest.mark.parametrize("prefix", [b"", b"no zlib", zlib.compress(bytes(4 * 300))])
def test_tokens_of_a_kept_export_that_are_damaged_are_not_sent(home, prefix):
    a = home("a")
    a.store()
    opened = a.open_export()
    opened.keep(a.ledger, NOW)
    opened.close()
    with a.ledger._transaction():
        a.ledger._all("UPDATE artifact SET prefix = ?", (prefix,))
    with pytest.raises(StorageError):
        reopen(a, opened.artifact_id)
    assert a.cache.stats().leases == 0


def test_a_kept_export_is_gone_when_its_path_is(home):
    a = home("a", layout=DENSE, block_size=BIG, cap=6 * MIB)
    a.store(FIRST, [BIG], kinds={})
    opened = a.open_export(FIRST)
    opened.keep(a.ledger, NOW)
    opened.close()
    fill(a)
    with pytest.raises(ArtifactGoneError):
        reopen(a, opened.artifact_id)


TWO_PROMPTS = {8: {PointKind.PROMPT}, 11: {PointKind.PROMPT}}


def test_a_kept_export_is_gone_when_its_path_was_pruned(home):
    a = home("a", layout=HYBRID)
    a.store(kinds=TWO_PROMPTS)
    opened = a.open_export()
    opened.keep(a.ledger, NOW)
    # As long as it is open, the path is left alone.
    a.store(kinds=TWO_PROMPTS, retention=Retention())
    opened.close()
    reopen(a, opened.artifact_id).close()
    a.store(kinds=TWO_PROMPTS, retention=Retention())
    with pytest.raises(ArtifactGoneError):
        reopen(a, opened.artifact_id)
    assert a.cache.stats().leases == 0


def test_a_path_pruned_before_it_is_leased_is_not_signed(home, monkeypatch):
    a = home("a", layout=HYBRID)
    a.store(kinds=TWO_PROMPTS)
    real = a.cache.lease

    def late(*arguments):
        a.store(kinds=TWO_PROMPTS, retention=Retention())
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(a.cache, "lease", late)
        with pytest.raises(GoneError):
            a.open_export(TOKENS[:8])
    assert a.cache.stats().leases == 0
    with pytest.raises(NotRestorableError):
        a.open_export(TOKENS[:8])
    assert a.open_export().restorable_tokens == 11


def test_a_kept_export_is_gone_when_its_key_was_replaced(home):
    a = home("a")
    a.store()
    opened = a.open_export()
    opened.keep(a.ledger, NOW)
    opened.close()
    with pytest.raises(ArtifactGoneError):
        reopen(a, opened.artifact_id, key=SigningKey.generate().public)


@pytest.mark.parametrize("scope", ["default", "other"])
def test_an_export_that_was_not_kept_is_unknown(home, scope):
    a = home("a")
    a.store()
    kept, passing = a.open_export(), a.open_export()
    kept.keep(a.ledger, NOW)
    kept.close()
    passing.close()
    asked = passing if scope == "default" else kept
    with pytest.raises(ArtifactUnknownError):
        reopen(a, asked.artifact_id, scope=scope)


def test_expired_exports_are_forgotten_when_another_is_kept(home):
    a = home("a")
    a.store()
    old, new = a.open_export(), a.open_export(now=NOW + LIFETIME)
    old.keep(a.ledger, NOW)
    new.keep(a.ledger, NOW + LIFETIME)
    assert [r.id for r in a.ledger.artifacts()] == [new.artifact_id]
    old.close()
    new.close()


# Nothing to export.


def test_nothing_was_ever_computed(home):
    with pytest.raises(NeverComputedError):
        home("a").open_export()


def test_rows_without_a_restore_point(home):
    a = home("a", layout=HYBRID)
    a.store(kinds={})
    with pytest.raises(NotRestorableError):
        a.open_export()


def test_a_restore_point_beyond_the_asked_tokens_is_none(home):
    a = home("a", layout=HYBRID)
    a.store()
    with pytest.raises(NotRestorableError):
        a.open_export(TOKENS[:9])


def test_what_was_evicted_is_said_to_be(home):
    a = home("a", layout=DENSE, block_size=BIG, cap=6 * MIB)
    a.store(FIRST, [BIG], kinds={})
    fill(a)
    with pytest.raises(EvictedError):
        a.open_export(FIRST)
    with pytest.raises(NeverComputedError):
        a.open_export([7, 7, 7])


def test_evictions_of_another_scope_are_not_told(home):
    a = home("a", layout=DENSE, block_size=BIG, cap=6 * MIB)
    a.store(FIRST, [BIG], kinds={})
    fill(a)
    a.ns = a.cache.namespace(a.ns.identity, "other", BIG)
    with pytest.raises(NeverComputedError):
        a.open_export(FIRST)


def test_an_issue_lasts_thirty_days():
    assert LIFETIME.days == 30
    fields = {"issuer_name": "x", "model_name": "m", "tokenizer": "t", "now": NOW}
    assert Issue(signer=SigningKey.generate(), **fields).lifetime == LIFETIME
