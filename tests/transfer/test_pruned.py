"""Paths whose window rows and states are there in part: what is exported of them, and
under which names it comes in."""

import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.errors import ArtifactGoneError, GoneError
from kvport.snapshot.transfer.exporter import reopen_export
from kvport.snapshot.transfer.kept import Artifacts
from kvport.snapshot.volume import Volume
from tests.transfer.world import ALL, HYBRID, NOW, WINDOWED, Home

TOKENS = list(range(100, 120))
CUTS = (4, 8, 10, 12, 16, 18, 20)
KINDS = {
    4: {PointKind.STRIDE},
    10: {PointKind.FORK},
    18: {PointKind.PROMPT},
    20: {PointKind.REPLY},
}
# Windows are of three rows: 4, 18 and 20 can be restored, 10 lacks rows [4, 8), and the
# rows of [8, 10) serve no point.
WINDOWS = (4, 10, 16, 18, 20)


@pytest.fixture
def a(home) -> Home:
    found = home("a")
    found.store(TOKENS, CUTS, kinds=KINDS, windows=WINDOWS)
    return found


@pytest.fixture
def b(home, a) -> Home:
    found = home("b")
    found.trusted.append(a.key)
    return found


def artifacts(home: Home) -> Artifacts:
    return Artifacts(
        volume=Volume.holding(home.cache),
        ledger=home.ledger,
        scope="default",
        key=home.key.public,
        sealing_secret=home.sealing_secret,
        now=lambda: NOW,
    )


def reopen(home: Home, artifact):
    arguments = home.reopening()
    return reopen_export(home.cache, home.ledger, artifact, **arguments)


def kept(home: Home):
    """An export that was kept, and its bytes."""
    opened = home.open_export(TOKENS)
    opened.keep(home.ledger, NOW)
    return opened, b"".join(opened.stream())


def path_of(home: Home):
    """The one stored path, however far it restores."""
    (tip,) = (
        row["id"] for row in home.state()["index"]["node"] if row["end"] == len(TOKENS)
    )
    return home.cache.path(home.ns, tip)


# What is exported.


def test_a_point_that_lacks_window_rows_is_left_out(a):
    opened = a.open_export(TOKENS)
    assert [p.position for p in opened.manifest.points] == [4, 18, 20]
    opened.close()


def test_window_rows_that_serve_no_listed_point_are_left_out(a):
    opened = a.open_export(TOKENS)
    held = [
        s.end
        for s in opened.manifest.segments
        if any(blob.blob_class is BlobClass.WINDOW for blob in s.blobs)
    ]
    assert held == [4, 16, 18, 20]
    opened.close()


def test_a_point_that_lost_its_state_is_left_out_with_its_window_rows(a):
    a.prune(path_of(a)[0], BlobClass.STATE)
    opened = a.open_export(TOKENS)
    assert [p.position for p in opened.manifest.points] == [18, 20]
    assert not any(
        blob.blob_class is BlobClass.WINDOW
        for blob in opened.manifest.segments[0].blobs
    )
    opened.close()


@pytest.mark.parametrize("layout", [WINDOWED, HYBRID, ALL])
def test_what_was_left_out_is_not_missed(home, layout):
    a, b = home("a", layout=layout), home("b", layout=layout)
    b.trusted.append(a.key)
    a.store(TOKENS, CUTS, kinds=KINDS, windows=WINDOWS)
    assert b.take(a.export(TOKENS)).restored_tokens == 20
    for point in (4, 18):
        assert b.match(TOKENS[:point]).position == point


def test_an_export_ends_at_a_point_that_has_its_window_rows(a):
    a.prune(path_of(a)[-2], BlobClass.WINDOW)
    opened = a.open_export(TOKENS)
    assert 0 < opened.restorable_tokens < path_of(a)[-2].end
    opened.close()


@pytest.mark.parametrize("layout", [WINDOWED, HYBRID, ALL])
def test_an_end_that_is_kept_for_nothing_is_signed_as_a_point(home, layout):
    a = home("a", layout=layout)
    a.store(TOKENS, CUTS, kinds={**KINDS, 20: ()}, windows=WINDOWS)
    opened = a.open_export(TOKENS)
    assert opened.manifest.points[-1].kinds == (PointKind.PROMPT,)
    assert opened.restorable_tokens == 20
    opened.close()


# Under which names it comes in.


def test_the_path_has_its_own_name_on_each_side(a, b):
    opened, data = kept(a)
    b.take(data)
    stored = [node.id for node in path_of(a)]
    brought = [node.id for node in path_of(b)]
    # The same up to the first node of which something was left out.
    assert brought[:2] == stored[:2]
    assert not set(brought[2:]) & set(stored[2:])
    for home, ids in ((a, stored), (b, brought)):
        (record,) = home.ledger.artifacts()
        assert record.tip == ids[-1]
        assert artifacts(home).nodes(opened.artifact_id) == frozenset(ids)
        assert home.match(TOKENS, within=frozenset(ids)).position == 20


def test_importing_it_again_changes_nothing(a, b):
    data = a.export(TOKENS)
    b.take(data)
    before = b.state()
    again = b.take(data)
    assert (again.admitted_segments, again.present_segments) == (0, 7)
    assert b.state() == before


def test_ones_own_export_comes_in_as_a_variant_that_shares_the_blobs(a):
    opened, data = kept(a)
    stored = path_of(a)
    files = {k: v for k, v in a.state()["files"].items() if k.startswith("ns/")}
    result = a.take(data)
    assert (result.admitted_segments, result.present_segments) == (5, 2)
    after = a.state()
    assert {k: v for k, v in after["files"].items() if k.startswith("ns/")} == files
    # Both stay whole, and the export is still the one of the stored path.
    assert a.cache.path(a.ns, stored[-1].id) == stored
    brought = artifacts(a).nodes(opened.artifact_id)
    assert brought != frozenset(node.id for node in stored)
    assert a.match(TOKENS, within=brought).position == 20
    assert b"".join(reopen(a, opened.artifact_id).stream()) == data
    again = a.take(data)
    assert (again.admitted_segments, again.present_segments) == (0, 7)
    assert a.state() == after


def test_exported_on_it_keeps_its_names(a, b, home):
    c = home("c")
    c.trusted.append(b.key)
    b.take(a.export(TOKENS))
    c.take(b.export(TOKENS))
    assert [n.id for n in path_of(c)] == [n.id for n in path_of(b)]


# Retention after an export or an import.


def test_a_kept_export_outlives_what_it_does_not_hold(a):
    opened, data = kept(a)
    a.prune(path_of(a)[2], BlobClass.WINDOW)
    a.prune(path_of(a)[2], BlobClass.STATE)
    assert b"".join(reopen(a, opened.artifact_id).stream()) == data


@pytest.mark.parametrize(
    ("index", "blob_class"), [(0, BlobClass.STATE), (4, BlobClass.WINDOW)]
)
def test_a_kept_export_is_gone_with_a_blob_that_it_holds(a, index, blob_class):
    opened, _ = kept(a)
    a.prune(path_of(a)[index], blob_class)
    with pytest.raises(ArtifactGoneError):
        reopen(a, opened.artifact_id)
    assert a.cache.stats().leases == 0


def test_an_artifact_whose_end_cannot_be_restored_is_gone(a, b):
    opened, data = kept(a)
    b.take(data)
    for home in (a, b):
        known = artifacts(home)
        assert [one.stored for one in known.all()] == [True]
        home.prune(path_of(home)[-1], BlobClass.STATE)
        assert [one.stored for one in known.all()] == [False]
        for asked in (known.find, known.nodes):
            with pytest.raises(ArtifactGoneError):
                asked(opened.artifact_id)


def test_an_import_brings_back_what_retention_took(a, b):
    data = a.export(TOKENS)
    b.take(data)
    whole, before = path_of(b), b.state()
    for index, blob_class in (
        (0, BlobClass.STATE), (4, BlobClass.WINDOW), (6, BlobClass.WINDOW)
    ):  # fmt: skip
        b.prune(whole[index], blob_class)
    assert path_of(b) != whole
    again = b.take(data)
    assert (again.restored_tokens, again.admitted_segments) == (20, 0)
    assert path_of(b) == whole
    after = b.state()
    assert after["files"] == before["files"]
    assert after["account"] == before["account"]


def test_a_computed_segment_brings_back_what_retention_took(a):
    whole = path_of(a)
    a.prune(whole[4], BlobClass.WINDOW)
    a.store(TOKENS, CUTS, kinds=KINDS, windows=WINDOWS)
    assert path_of(a) == whole
    assert a.contents(whole)


def test_a_blob_that_goes_while_it_is_sent_ends_the_stream(a):
    opened = a.open_export(TOKENS)
    pieces = opened.stream()
    next(pieces)
    a.prune(path_of(a)[4], BlobClass.WINDOW)
    with pytest.raises(GoneError):
        list(pieces)
    assert a.cache.stats().leases == 0
    assert a.cache.longest(a.ns, encode_tokens(TOKENS)) == 20
