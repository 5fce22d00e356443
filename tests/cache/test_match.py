"""What a lookup takes: restore points, variants, ties, the exact rule."""

import attrs
import pytest

from kvport.manifest.identity import Lineage, PointKind
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from tests.cache.builder import (
    ALL,
    COLD,
    DENSE,
    HYBRID,
    KV,
    ME,
    NUMERICS,
    OTHER,
    OTHER_NUMERICS,
    ROTATING,
    WINDOWED,
    claim,
    find,
    open_cache,
    position,
    read_all,
    segments,
    space,
    store,
)

TOKENS = list(range(1000, 2000))


@pytest.mark.parametrize("layout", [DENSE, WINDOWED, HYBRID, ALL])
def test_what_was_stored_is_read_after_reopening(root, layout):
    cuts = [256, 512, 600, 700]
    with open_cache(root) as cache:
        ns = space(cache, layout)
        tip = store(cache, ns, TOKENS, cuts, kinds={600: {PointKind.FORK}})
    with open_cache(root) as cache:
        assert space(cache, layout) == ns
        match = find(cache, ns, TOKENS)
        assert (match.position, match.tip, match.base) == (700, tip, 700)
        assert [node.end for node in match.nodes] == cuts
        assert match.nodes == cache.path(ns, tip)
        assert match.nodes[2].kinds == {PointKind.FORK}
        assert match.nodes[0].parent == ROOT_NODE
        for node, segment in zip(match.nodes, segments(ns, TOKENS, cuts), strict=True):
            assert node.key == segment.key
            assert node.attestations == (claim(),)
            assert [ref.blob_class for ref in node.blobs] == list(layout.blob_classes)
            for ref in node.blobs:
                stored = b"".join(segment.blobs[ref.blob_class])
                assert cache.read(ns, ref) == stored
                assert node.blob(ref.blob_class) == ref
        with cache.open_blob(ns, match.nodes[0].blobs[0]) as file:
            assert len(file.read()) == match.nodes[0].blobs[0].size


def test_full_layers_restore_at_any_row(cache, ns):
    store(cache, ns, TOKENS, [256, 512, 600])
    for shared in (1, 2, 255, 256, 257, 400, 599):
        prompt = TOKENS[:shared] + [7] * 50
        match = find(cache, ns, prompt)
        assert match.position == shared
        assert match.base == shared - shared % 256
        assert match.nodes[-1].end >= shared
    assert position(cache, ns, TOKENS, limit=300) == 300
    assert position(cache, ns, TOKENS[:1]) == 1
    assert find(cache, ns, [7]) is None
    assert find(cache, ns, []) is None
    assert find(cache, ns, TOKENS, limit=0) is None


def test_whole_layers_restore_at_their_boundaries_only(cache):
    ns = space(cache, HYBRID)
    store(cache, ns, TOKENS, [256, 512, 590, 599], states=[512, 599])
    assert position(cache, ns, TOKENS) == 599
    assert position(cache, ns, TOKENS, limit=598) == 512
    assert position(cache, ns, TOKENS[:595] + [7] * 100) == 512
    assert find(cache, ns, [*TOKENS[:511], 7]) is None
    assert cache.longest(ns, encode_tokens([*TOKENS[:511], 7])) == 511


def test_windows_restore_at_the_ends_of_segments(cache):
    ns = space(cache, WINDOWED)
    store(cache, ns, TOKENS, [256, 512, 590])
    assert position(cache, ns, TOKENS) == 590
    assert position(cache, ns, TOKENS, limit=589) == 512
    assert position(cache, ns, TOKENS[:300] + [7] * 100) == 256
    assert find(cache, ns, TOKENS[:255]) is None


WIDE = StateLayout((KV, attrs.evolve(ROTATING, window=48)))


@pytest.mark.parametrize(
    ("cuts", "windows", "expected"),
    [
        # The last 48 rows of one segment are in its own blob.
        ([256, 512], [512], 512),
        ([256, 512], [256], 256),
        ([256, 512], [], 0),
        # Two segments hold them, then three; the one before is not asked for.
        ([256, 280, 300], [280, 300], 0),
        ([256, 280, 300], [256, 280, 300], 300),
        ([256, 280, 304], [280, 304], 304),
        ([256, 280, 303], [280, 303], 0),
        ([256, 300, 310, 320], [300, 310, 320], 320),
        ([252, 300, 310, 320], [300, 320], 300),
        # Fewer rows than the window: all of them.
        ([20, 40], [40], 0),
        ([20, 40], [20, 40], 40),
    ],
)
def test_windows_restore_where_all_their_rows_are(cache, cuts, windows, expected):
    ns = space(cache, WIDE)
    store(cache, ns, TOKENS, cuts, windows=windows)
    assert position(cache, ns, TOKENS) == expected
    assert cache.longest(ns, encode_tokens(TOKENS)) == cuts[-1]


def test_a_window_that_covers_one_variant_covers_no_other(cache):
    ns = space(cache, WIDE)
    store(cache, ns, TOKENS, [256, 280], variant="whole")
    store(cache, ns, TOKENS, [256, 280, 290], variant="bare", windows=[280, 290])
    assert position(cache, ns, TOKENS) == 280


def test_the_worked_example_of_two_turns(cache):
    ns = space(cache, HYBRID)
    turn1 = list(range(600)) + list(range(5000, 5100))
    ends = [256, 512, 590, 599, 700]
    kinds = {
        590: {PointKind.FORK},
        599: {PointKind.PROMPT},
        700: {PointKind.REPLY},
    }
    end1 = store(
        cache, ns, turn1, ends, states=[590, 599, 700], kinds=kinds,
        provenance=lambda end: COLD if end <= 512 else claim(),
    )  # fmt: skip
    written = cache.stats().total.written[BlobClass.KV]
    turn2 = list(range(590)) + list(range(9000, 9410))
    match = find(cache, ns, turn2, limit=999)
    assert (match.position, match.nodes[-1].kinds) == (590, {PointKind.FORK})
    chain = cache.chain(ns, match.tip, "turn 2")
    for segment in segments(
        ns, turn2, [768, 960, 999], start=590, states=[960, 999], variant=2
    ):
        chain.append(segment)
    chain.close()
    cache.flush()
    # Three segments more, nothing of turn 1 again, and both branches stand.
    assert cache.stats().total.written[BlobClass.KV] == written + 3000
    assert position(cache, ns, [*turn1, 1, 2, 3]) == 700
    found = find(cache, ns, turn2)
    assert [node.end for node in found.nodes] == [256, 512, 590, 768, 960, 999]
    assert found.nodes[:3] == cache.path(ns, end1)[:3]
    # Exact: only the cold part, only at multiples of the chunk; no state there.
    assert find(cache, ns, turn1, exact=True) is None


def test_variants_of_one_prefix_stay_apart(cache, ns):
    mine = store(cache, ns, TOKENS, [256, 512], variant="a")
    theirs = store(cache, ns, TOKENS, [256, 512, 600], variant="b")
    assert find(cache, ns, TOKENS).tip == theirs
    halves = {cache.path(ns, tip)[1].id for tip in (mine, theirs)}
    assert find(cache, ns, TOKENS, limit=512).tip in halves
    for tip in (mine, theirs):
        path = cache.path(ns, tip)
        within = frozenset(node.id for node in path)
        assert find(cache, ns, TOKENS, within=within).nodes == path
        keys = [segment.key for segment in segments(ns, TOKENS, [256, 512, 600])]
        assert [node.key for node in path] == keys[: len(path)]
    first = {cache.path(ns, tip)[0].blobs[0].digest for tip in (mine, theirs)}
    assert len(first) == 2


def test_equal_bytes_are_one_node_with_merged_claims(cache, ns):
    one = store(cache, ns, TOKENS, [256], kinds={256: {PointKind.FORK}})
    before = cache.stats()
    two = store(
        cache, ns, TOKENS, [256], kinds={256: {PointKind.REPLY}}, provenance=COLD
    )
    assert one == two
    assert cache.stats().namespaces == before.namespaces
    assert cache.stats().total.written == before.total.written
    [node] = cache.path(ns, one)
    assert node.kinds == {PointKind.FORK, PointKind.REPLY}
    assert set(node.attestations) == {claim(), COLD}


def test_exact_takes_cold_chunk_multiples_made_here_with_these_numerics(cache, ns):
    store(
        cache, ns, TOKENS, [256, 512, 768, 999],
        provenance=lambda end: COLD if end <= 768 else claim(),
    )  # fmt: skip
    assert position(cache, ns, TOKENS) == 999
    assert position(cache, ns, TOKENS, exact=True) == 512
    assert (
        find(cache, ns, TOKENS, exact=True).tip
        == find(cache, ns, TOKENS, limit=512).tip
    )
    assert find(cache, ns, TOKENS, exact=True, limit=511) is None


@pytest.mark.parametrize(
    "provenance",
    [
        claim(Lineage.DERIVED),
        claim(Lineage.COLD, [OTHER]),
        claim(Lineage.COLD, [ME, OTHER]),
        claim(Lineage.COLD, numerics=OTHER_NUMERICS),
        claim(Lineage.COLD, numerics=attrs.evolve(NUMERICS, chunk=256)),
    ],
)
def test_exact_refuses_a_path_with_one_other_node(cache, ns, provenance):
    store(
        cache, ns, TOKENS, [256, 512],
        provenance=lambda end: provenance if end == 256 else COLD,
    )  # fmt: skip
    assert find(cache, ns, TOKENS, exact=True) is None
    assert position(cache, ns, TOKENS) == 512
    # The same bytes computed here, cold: the claim is added, and it is exact.
    store(cache, ns, TOKENS, [256, 512], provenance=COLD)
    assert position(cache, ns, TOKENS, exact=True) == 512


def test_ties_go_to_cold_then_made_here_then_most_recent(cache, ns):
    def stored(variant, provenance):
        return store(cache, ns, TOKENS, [256], variant=variant, provenance=provenance)

    def chosen():
        return find(cache, ns, TOKENS, limit=256).tip

    foreign = stored("foreign", claim(origins=[OTHER]))
    assert chosen() == foreign
    first = stored("first", claim())
    stored("late foreign", claim(origins=[OTHER]))
    assert chosen() == first
    second = stored("second", claim())
    assert chosen() == second
    only = frozenset([first])
    assert find(cache, ns, TOKENS, within=only).tip == first  # renews it
    assert chosen() == first
    cold = stored("cold foreign", claim(Lineage.COLD, [OTHER]))
    assert chosen() == cold
    stored("last", claim())
    assert chosen() == cold


def test_a_longer_restore_beats_every_tie_rule(cache, ns):
    store(cache, ns, TOKENS, [256], variant="cold", provenance=COLD)
    far = store(cache, ns, TOKENS, [257], variant="far", provenance=claim())
    assert find(cache, ns, TOKENS).tip == far


def test_scopes_and_identities_do_not_meet(cache):
    here = space(cache)
    store(cache, here, TOKENS, [256])
    assert find(cache, space(cache, scope="other"), TOKENS) is None
    assert find(cache, space(cache, HYBRID), TOKENS) is None
    # Length-prefixed: a scope cannot run into the block size.
    assert len({space(cache, scope=s).id for s in ("a", "b", "aa", "default")}) == 4


def test_b32_a_request_right_after_another_sees_its_state(cache, ns):
    for round_ in range(20):
        tokens = [round_, *TOKENS]
        chain = cache.chain(ns, ROOT_NODE, "first")
        for segment in segments(ns, tokens, [256, 512]):
            chain.append(segment)
        assert position(cache, ns, tokens) == 512


def test_a_partial_match_can_be_continued(cache, ns):
    store(cache, ns, TOKENS, [256, 512])
    prompt = TOKENS[:300] + [7] * 100
    match = find(cache, ns, prompt)
    assert (match.position, match.base, len(match.nodes)) == (300, 256, 2)
    # Rows [256, 300) are stored again, in a segment of the new path.
    store(cache, ns, prompt, [400], tip=match.tip, start=match.base)
    again = find(cache, ns, prompt)
    assert again.position == 400
    read_all(cache, ns, again.nodes)
