"""Retention as a pure function: held to its rules, said once more in another way."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import PointKind
from kvport.snapshot.cache.retention import PathNode, Retention, judge

STRIDE, FORK, PROMPT, REPLY = PointKind


@st.composite
def paths(draw):
    nodes, start = [], 0
    for length, kinds, branches in draw(
        st.lists(
            st.tuples(
                st.integers(1, 9),
                st.frozensets(st.sampled_from(PointKind)),
                st.sampled_from([0, 0, 0, 1, 2]),
            ),
            max_size=25,
        )
    ):
        nodes.append(PathNode(start, start + length, kinds, branches + 1))
        start += length
    if nodes:
        nodes[-1] = attrs.evolve(nodes[-1], children=nodes[-1].children - 1)
    return nodes


small = st.integers(1, 3)
retentions = st.builds(
    Retention,
    newest=st.integers(1, 60),
    every=st.integers(1, 12),
    forks=small,
    prompts=small,
    replies=small,
)
needs = st.builds(WindowCoverage, window=st.integers(0, 30), head=st.integers(0, 6))


NO_WINDOW = WindowCoverage(window=0)


def kept(path, retention, need=NO_WINDOW):
    return [verdict.kinds for verdict in judge(path, retention, need)]


def applied(path, verdicts):
    return [
        attrs.evolve(node, kinds=verdict.kinds)
        for node, verdict in zip(path, verdicts, strict=True)
    ]


@given(paths(), retentions)
def test_a_kind_stays_by_its_own_rule_or_at_a_branch(path, retention):
    numbers = {
        FORK: retention.forks,
        PROMPT: retention.prompts,
        REPLY: retention.replies,
    }
    for i, (node, kinds) in enumerate(zip(path, kept(path, retention), strict=True)):
        for kind in PointKind:
            if kind is STRIDE:
                near = node.end >= path[-1].end - retention.newest
                stays = near or not node.end % retention.every
            else:
                after = sum(kind in later.kinds for later in path[i + 1 :])
                stays = after < numbers[kind]
            branch = FORK not in node.kinds and node.children > 1
            assert (kind in kinds) == (kind in node.kinds and (stays or branch))


def rows_of(node, need):
    return range(max(node.start, node.end - need.window), node.end)


@given(paths(), retentions, needs)
def test_every_point_that_stays_has_its_window_rows(path, retention, need):
    verdicts = judge(path, retention, need)
    for point, verdict in zip(path, verdicts, strict=True):
        off_path = point.children > (point is not path[-1])
        if not verdict.kinds and not off_path:
            continue
        held = {
            row
            for node, other in zip(path, verdicts, strict=True)
            if other.window
            for row in range(node.start, node.end)
            if row in rows_of(node, need) or row < need.head
        }
        wanted = range(max(0, point.end - need.window), point.end)
        assert held.issuperset(wanted)
        assert held.issuperset(range(min(need.head, point.end)))
        # As a lookup sees it.
        above = 0
        for node, other in zip(path, verdicts, strict=True):
            above = need.covered_from(above, node.start, node.end, present=other.window)
            if node is point:
                break
        assert need.is_met(above, point.end)


@given(paths(), retentions, needs)
def test_no_window_rows_stay_without_a_point_that_needs_them(path, retention, need):
    verdicts = judge(path, retention, need)
    for i, (node, verdict) in enumerate(zip(path, verdicts, strict=True)):
        below = zip(path[i:], verdicts[i:], strict=True)
        reasons = [
            point.end
            for point, other in below
            if other.kinds or point.children > (point is not path[-1])
        ]
        needed = any(
            node.start < need.head
            or set(rows_of(node, need)) & set(range(end - need.window, end))
            for end in reasons
        )
        assert verdict.window == needed


@given(paths(), retentions, needs, st.data())
def test_a_shorter_path_never_takes_what_a_longer_one_keeps(
    path, retention, need, data
):
    length = data.draw(st.integers(0, len(path)))
    long = judge(path, retention, need)[:length]
    short = judge(path[:length], retention, need)
    for mine, theirs in zip(short, long, strict=True):
        assert mine.kinds >= theirs.kinds
        assert mine.window >= theirs.window
        assert mine.passed <= theirs.passed


@given(paths(), retentions, needs)
def test_a_second_look_takes_nothing_more(path, retention, need):
    verdicts = judge(path, retention, need)
    again = judge(applied(path, verdicts), retention, need)
    for first, second in zip(verdicts, again, strict=True):
        assert second.kinds == first.kinds
        assert second.window == first.window


@given(paths())
def test_branches_are_dead_below_forks_that_a_prompt_has_passed(path):
    for i, (node, verdict) in enumerate(
        zip(path, judge(path, Retention(), WindowCoverage(window=4)), strict=True)
    ):
        passed = any(PROMPT in later.kinds for later in path[i + 1 :])
        assert verdict.passed == (FORK in node.kinds and passed)


def line(*points, children=1):
    """A path of segments of one token at each of these positions."""
    path, start = [], 0
    for end, kind in points:
        path.append(PathNode(start, end, frozenset({kind}), children))
        start = end
    return path


def test_strides_thin_out_behind_the_newest():
    path = line(*((p, STRIDE) for p in range(4096, 100_001, 4096)))
    ends = [n.end for n, k in zip(path, kept(path, Retention()), strict=True) if k]
    end = path[-1].end
    assert ends == [*range(16_384, 65_536, 16_384), *range(65_536, end + 1, 4096)]


def test_a_point_replaces_its_own_kind_only():
    path = line((10, PROMPT), (20, REPLY), (30, FORK), (40, PROMPT), (50, FORK))
    assert kept(path, Retention()) == [
        frozenset(), {REPLY}, {FORK}, {PROMPT}, {FORK},
    ]  # fmt: skip
    both = [attrs.evolve(path[0], kinds=frozenset({PROMPT, REPLY})), *path[2:]]
    assert kept(both, Retention())[0] == {REPLY}


def test_an_empty_path_has_no_verdicts():
    assert judge([], Retention(), WindowCoverage(window=4)) == []


@pytest.mark.parametrize("name", [a.name for a in attrs.fields(Retention)])
def test_numbers_below_one_are_refused(name):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=name):
            Retention(**{name: wrong})
