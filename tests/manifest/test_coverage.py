"""Which window blobs a point needs, against a count of single rows."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.coverage import WindowCoverage
from tests.manifest.builder import ALL, DENSE

CUTS = st.sets(st.integers(1, 60), min_size=1).map(sorted)
COVERAGE = st.builds(WindowCoverage, st.integers(1, 70), st.integers(0, 20))


def rows_of(coverage, point):
    """The windowed rows that a restore at a point takes."""
    window = range(max(point - coverage.window, 0), point)
    return {*window, *range(min(coverage.head, point))}


@given(CUTS, COVERAGE, st.data())
def test_a_segment_is_needed_if_one_of_its_rows_is(cuts, coverage, data):
    points = data.draw(st.sets(st.sampled_from(cuts)).map(sorted))
    needed = {row for point in points for row in rows_of(coverage, point)}
    for start, end in pairwise([0, *cuts]):
        expected = bool(needed & set(range(start, end)))
        assert coverage.needs(start, end, points) == expected


@given(CUTS, COVERAGE, st.data())
def test_an_end_restores_if_every_row_that_it_needs_is_there(cuts, coverage, data):
    segments = [(a, b, data.draw(st.booleans())) for a, b in pairwise([0, *cuts])]
    there = {row for a, b, present in segments if present for row in range(a, b)}
    assert coverage.restorable(segments) == [
        rows_of(coverage, end) <= there for _, end, _ in segments
    ]


def test_a_layout_without_windows_needs_none():
    coverage = WindowCoverage.of(DENSE)
    assert not coverage.needs(0, 4, [4, 8])
    assert coverage.restorable([(0, 4, False), (4, 8, False)]) == [True, True]


def test_the_widest_window_counts():
    assert WindowCoverage.of(ALL) == WindowCoverage(3)
