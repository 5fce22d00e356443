"""Conversations of made-up bytes, turn by turn, with points where capture puts them."""

from collections.abc import Iterator

import attrs

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import StateLayout
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.cache.retention import Retention
from tests.cache.builder import ARRAYS, KV, ROTATING, find, store, stored_tokens

WIDE = attrs.evolve(ROTATING, window=48)
HYBRID = StateLayout((KV, ARRAYS))
WINDOWED = StateLayout((KV, WIDE))
ALL = StateLayout((KV, WIDE, ARRAYS))

STRIDE = 100
KEEP = Retention(newest=300, every=1000)


@attrs.define
class Talk:
    """One conversation: `tokens` is the history as the template renders it."""

    cache: Cache
    ns: Namespace
    name: int = 0
    retention: Retention | None = KEEP
    tokens: list[int] = attrs.field(factory=list)
    tip: NodeId = ROOT_NODE
    restored: int = 0
    _said: int = 0

    def turn(self, user: int = 60, reply: int = 60, *, thinking: bool = False) -> None:
        """Ask and answer; a thinking template drops half of the reply afterwards."""
        prompt = [*self.tokens, *self._fresh(user)]
        fork = len(prompt) - 10
        said = self._fresh(reply)
        whole = prompt + said
        points = {len(prompt) - 1: {PointKind.PROMPT}, len(whole): {PointKind.REPLY}}
        if thinking:
            points[fork] = {PointKind.FORK}
        for position in range(STRIDE, len(whole) + 1, STRIDE):
            points.setdefault(position, set()).add(PointKind.STRIDE)
        match = find(self.cache, self.ns, prompt, limit=len(prompt) - 1)
        self.restored = match.base if match else 0
        cuts = sorted(p for p in {*points, *range(256, len(whole), 256)})
        self.tip = store(
            self.cache,
            self.ns,
            whole,
            [cut for cut in cuts if cut > self.restored],
            tip=match.tip if match else ROOT_NODE,
            start=self.restored,
            states=list(points),
            kinds=points,
            variant=self.name,
            retention=self.retention,
        )
        self.tokens = whole
        if thinking:
            self.tokens = prompt[:fork] + said[reply // 2 :]

    def branch(self, name: int) -> "Talk":
        """Another conversation with the same history."""
        return attrs.evolve(self, name=name, tokens=list(self.tokens))

    def points(self) -> Iterator[tuple[int, frozenset[PointKind]]]:
        """Positions and kinds of the last path."""
        for node in self.cache.path(self.ns, self.tip):
            if node.kinds:
                yield node.end, node.kinds

    def restores(self, position: int) -> bool:
        """Whether the last path restores at this very position."""
        path = self.cache.path(self.ns, self.tip)
        tokens = stored_tokens(self.cache, self.ns, path)[: 4 * position]
        within = frozenset(node.id for node in path)
        ids = list(memoryview(tokens).cast("I"))
        match = find(self.cache, self.ns, ids, within=within)
        return match is not None and match.position == position

    def _fresh(self, count: int) -> list[int]:
        start = 1_000_000 * self.name + self._said
        self._said += count
        return list(range(start, start + count))
