"""Which segments' `window` blobs a restore point needs: one rule for all who ask.

A restore point at p needs the windowed rows [p - window, p), and rows [0, head) where
layers never drop their first ones. A window blob of segment [a, b) holds rows
[max(a, b - window), b), so that p needs the blob of every segment that overlaps either
range, and no other. Positions are in tokens.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from kvport.manifest.layout import StateLayout

_NEVER: Final = sys.maxsize


@attrs.frozen
class WindowCoverage:
    """The rule for one layout.

    Attributes:
        window: rows before a point that some layer needs; 0 without windowed layers.
        head: first rows that some layer never drops.
    """

    window: int
    head: int = 0

    @classmethod
    def of(cls, layout: StateLayout) -> "WindowCoverage":
        """The rule for the widest of the layout's windows, and the longest head."""
        return cls(layout.max_window, layout.head)

    def includes(self, start: int, end: int, point: int) -> bool:
        """Whether a point, at `end` or behind it, needs the blob of [start, end)."""
        return end > point - self.window or start < self.head

    def needs(self, start: int, end: int, points: Sequence[int]) -> bool:
        """Whether any of the points needs the window blob of segment [start, end).

        Args:
            start: first row.
            end: one past the last.
            points: positions, ascending; each is the end of a segment.
        """
        # Of the points behind the segment's start the nearest needs the most of it.
        nearest = bisect_right(points, start)
        return nearest < len(points) and self.includes(start, end, points[nearest])

    def covered_from(self, above: int, start: int, end: int, *, present: bool) -> int:
        """The position from which window blobs are at hand without a gap up to `end`.

        Args:
            above: the same of the segment before; 0 for the first.
            start: of this segment.
            end: of this segment.
            present: whether its window blob is at hand.
        """
        if present or above == _NEVER:
            return above
        # Without its head nothing further down can be restored.
        return _NEVER if start < self.head else end

    def is_met(self, covered_from: int, point: int) -> bool:
        """Whether a point's window rows are at hand, if all are from this position."""
        return covered_from <= max(0, point - self.window)

    def restorable(self, segments: Iterable[tuple[int, int, bool]]) -> list[bool]:
        """For each segment, whether all window rows that its end needs are at hand.

        Args:
            segments: start, end, and whether there is a window blob; from row 0 on,
                without gaps.
        """
        found, covered = [], 0
        for start, end, present in segments:
            covered = self.covered_from(covered, start, end, present=present)
            found.append(self.is_met(covered, end))
        return found
