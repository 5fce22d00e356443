"""Retention: which points of a path stay, and which window rows these need.

In: the nodes of one path, root first, and the rules' numbers. Out: a verdict per node.
Pure: leases, and what is really stored, are the business of who asks. The rules:

* A stride point stays within `newest` tokens of the path's end, before that at
  multiples of `every`.
* The newest `forks` forks, `prompts` prompts and `replies` replies stay.
* So a point replaces only its own kind. A position stays while any of its kinds does;
  kinds that do not are dropped from it.
* A point that is no fork, and at which the tree branches, stays as it is: agents that
  share a prompt come back to it.
* A pinned point stays as it is.
* A point that does not stay loses its whole layers' state.
* A node keeps its window rows while a point needs them that stays, at or below it.
  Where other branches hang on a node of the path, they are kept as if it stayed, even
  if it is a fork that does not: points of these branches may need rows above it.
* Below a fork that a later prompt has passed, a prompt that only opened a reply there,
  and the reply, are dead: templates that drop the reasoning never ask for them again.
"""

from collections.abc import Iterable, Sequence

import attrs
from attrs.validators import ge

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import PointKind


@attrs.frozen
class Retention:
    """How much is kept of a path; tokens for strides, counts for the rest.

    Attributes:
        newest: stride points within this distance of the path's end stay.
        every: before that, stride points at multiples of it do.
        forks: newest forks that stay.
        prompts: newest ends of prompts that stay.
        replies: newest ends of replies that stay.

    Raises:
        ValueError: a number below 1.
    """

    newest: int = attrs.field(default=32_768, validator=ge(1))
    every: int = attrs.field(default=16_384, validator=ge(1))
    forks: int = attrs.field(default=2, validator=ge(1))
    prompts: int = attrs.field(default=1, validator=ge(1))
    replies: int = attrs.field(default=1, validator=ge(1))


@attrs.frozen
class PathNode:
    """A node of the path: segment [start, end), and how many nodes hang on it.

    One that is pinned stays a point, as it is.
    """

    start: int
    end: int
    kinds: frozenset[PointKind]
    children: int
    pinned: bool = False


@attrs.frozen
class Verdict:
    """What becomes of a node.

    Attributes:
        kinds: that stay; without any, it is no point, and its state goes.
        window: whether its window rows stay.
        passed: whether branches below it, off the path and without a fork, are dead.
    """

    kinds: frozenset[PointKind]
    window: bool
    passed: bool


def judge(
    path: Sequence[PathNode], retention: Retention, need: WindowCoverage
) -> list[Verdict]:
    """Judge every node of a path, which ends at the last one."""
    kept = _kept_kinds(path, retention)
    last_prompt = max(_ends(path, PointKind.PROMPT), default=0)
    verdicts: list[Verdict] = []
    # From the end: the nearest position below that needs rows above it.
    anchor: int | None = None
    for node, kinds in zip(reversed(path), reversed(kept), strict=True):
        if kinds or node.pinned or node.children > bool(verdicts):
            anchor = node.end
        verdicts.append(
            Verdict(
                kinds=kinds,
                window=anchor is not None
                and need.includes(node.start, node.end, anchor),
                passed=PointKind.FORK in node.kinds and node.end < last_prompt,
            )
        )
    return verdicts[::-1]


def _kept_kinds(
    path: Sequence[PathNode], retention: Retention
) -> list[frozenset[PointKind]]:
    end = path[-1].end if path else 0
    stay = {
        PointKind.STRIDE: {
            position
            for position in _ends(path, PointKind.STRIDE)
            if end - position <= retention.newest or position % retention.every == 0
        }
    }
    for kind, count in (
        (PointKind.FORK, retention.forks),
        (PointKind.PROMPT, retention.prompts),
        (PointKind.REPLY, retention.replies),
    ):
        stay[kind] = set(_ends(path, kind)[-count:])
    return [
        node.kinds
        if node.pinned or (node.children > 1 and PointKind.FORK not in node.kinds)
        else frozenset(kind for kind in node.kinds if node.end in stay[kind])
        for node in path
    ]


def _ends(path: Iterable[PathNode], kind: PointKind) -> list[int]:
    return [node.end for node in path if kind in node.kinds]
