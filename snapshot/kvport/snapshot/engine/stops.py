"""Where prefill stops, and which positions become points: a pure plan.

A stop changes bits (the last chunk gets another shape), so the plan depends on the
prompt alone, never on what was restored: cold and warm runs stop at the same positions.
Prefill stops at chunk multiples and at P - 1; at a fork only where the model has whole
layers, since rows are cut anywhere but a state is not.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass, StateLayout


@attrs.frozen
class Plan:
    """The way of one prompt of P tokens.

    Attributes:
        stops: positions at which prefill stops, ascending; the last one is P - 1
            (without any if P is 1).
        points: kinds by position, each at most P - 1.
    """

    stops: tuple[int, ...]
    points: Mapping[int, frozenset[PointKind]]

    def segments(self, prompt: Sequence[int], restored: int) -> list[Sequence[int]]:
        """The rest of the prompt after a restored position, cut at the stops."""
        ahead = [stop for stop in self.stops if stop > restored]
        bounds = [restored, *ahead, len(prompt)]
        return [prompt[a:b] for a, b in itertools.pairwise(bounds)]


def plan(
    length: int, *, layout: StateLayout, chunk: int, stride: int, fork: int | None
) -> Plan:
    """Plan the prefill of a prompt.

    Args:
        length: tokens in the prompt, P >= 1.
        layout: the model's layout.
        chunk: tokens evaluated at once.
        stride: distance of `stride` points, a multiple of the chunk.
        fork: where this prompt and its continuations part, if known.
    """
    last = length - 1
    points: dict[int, set[PointKind]] = {}
    for position in range(stride, last + 1, stride):
        points.setdefault(position, set()).add(PointKind.STRIDE)
    if fork is not None and 0 < fork <= last:
        points.setdefault(fork, set()).add(PointKind.FORK)
    if last:
        points.setdefault(last, set()).add(PointKind.PROMPT)
    stops = {*range(chunk, last, chunk), last} - {0}
    if layout.has(BlobClass.STATE) and fork in points:
        stops.add(fork)
    return Plan(
        stops=tuple(sorted(stops)),
        points={p: frozenset(kinds) for p, kinds in sorted(points.items())},
    )


def cuts(
    start: int, end: int, block_size: int, at: Iterable[int]
) -> list[tuple[int, int]]:
    """Segments of [start, end): cut at block ends, and at further positions."""
    if start >= end:
        return []
    first = (start // block_size + 1) * block_size
    ends = {*range(first, end, block_size), end}
    ends.update(p for p in at if start < p < end)
    bounds = [start, *sorted(ends)]
    return list(itertools.pairwise(bounds))
