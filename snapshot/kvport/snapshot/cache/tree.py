"""The walk down the tree: which stored path restores the most of these tokens.

In: encoded tokens and a `Selection`. Out: the row of the path's last node and the
position. All variants are followed; every node that fits the tokens is visited once. A
node may have lost blobs that no point needed: what is left decides.

Equal keys are equal tokens: the walk compares key(end) of the prompt. How far a prompt
goes along with a node that it leaves is asked only where rows may be cut anywhere, and
is read from the trailer of the node's file; of many such nodes only the newest few are
looked at, which costs less than a segment's tokens.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import attrs

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import Lineage, Provenance
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE, KeyChain
from kvport.snapshot.cache.expiry import first_current
from kvport.snapshot.cache.index import ROOT_ROW, Index, first_token
from kvport.snapshot.cache.records import BlobRef, Namespace, Selection
from kvport.snapshot.cache.schema import class_number

FEW: Final = 16
"""Children that are looked at one by one, and nodes whose trailers are read."""

_NODE: Final = """
SELECT parent, n, id, "end", key, first_token, used,
    coalesce((SELECT sum(1 << class) FROM blob WHERE node = node.n), 0),
    coalesce((SELECT group_concat(claim) FROM attest WHERE node = node.n), '')
FROM node {}"""
_CHILDREN: Final = _NODE.format("WHERE ns = ? AND parent = ? LIMIT ?")
_NEXT_END: Final = """
SELECT min("end") FROM node INDEXED BY node_whole
WHERE ns = ? AND parent = ? AND "end" > ?"""
_WHOLE: Final = _NODE.format("""
INDEXED BY node_whole WHERE ns = ?1 AND parent = ?2
    AND "end" = ?3 AND substr(key, 1, 8) = substr(?4, 1, 8)""")
_PARTING: Final = _NODE.format("""
INDEXED BY node_parting WHERE ns = ? AND parent = ? AND first_token = ?
ORDER BY n DESC LIMIT ?""")
_THESE: Final = _NODE.format("WHERE n IN (SELECT value FROM json_each(?))")
_ROWS_OF: Final = """
SELECT digest, size, trailer FROM blob JOIN file ON file.n = blob.file
WHERE node = ? AND blob.class = ?"""

ReadTrailer = Callable[[BlobRef], bytes]
"""What follows a blob in its file; nothing if that cannot be read."""


@attrs.frozen
class Prompt:
    """What is looked up, and where.

    Attributes:
        namespace: where.
        ns: its row.
        tokens: encoded ids.
        selection: restore points that may be taken.
        trailer: reads the ids of a stored segment.
    """

    namespace: Namespace
    ns: int
    tokens: bytes
    selection: Selection
    trailer: ReadTrailer

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tokens) // TOKEN_SIZE


@attrs.frozen
class _Row:
    parent: int
    n: int
    id: NodeId
    end: int
    key: bytes
    first_token: int
    used: int
    classes: int
    claims: str

    def has(self, blob_class: BlobClass) -> bool:
        return bool(self.classes >> class_number(blob_class) & 1)


@attrs.frozen
class _Facts:
    """What a node's claims come to, for this selection."""

    cold: bool
    local: bool
    exact: bool


@attrs.frozen
class _Visit:
    """A node that shares its tokens up to `common` with the prompt."""

    row: _Row
    facts: _Facts
    start: int
    common: int
    covered_from: int
    """Window rows are stored from this position up to the end, without a gap."""


class Found(NamedTuple):
    """A restore point; greater is better: position, cold, made here, recency."""

    position: int
    cold: bool
    local: bool
    used: int
    n: int


def best(index: Index, prompt: Prompt) -> Found | None:
    """The restore point that the selection prefers, None if it allows none."""
    layout, selection = prompt.namespace.layout, prompt.selection
    need = WindowCoverage.of(layout)
    walk = _Walk(index, prompt, need)

    def points(visits: Iterable[_Visit]) -> Iterator[Found]:
        for visit in visits:
            if found := _restore_point(index, visit, layout, selection, need):
                yield found

    found = _first_current(index, points(walk.whole()))
    if not layout.full_only:
        return found
    least = 0 if found is None else found.position
    parting = points(walk.parting(least, selection.limit))
    return _first_current(index, parting if found is None else (found, *parting))


def _first_current(index: Index, points: Iterable[Found]) -> Found | None:
    """The best that has not expired: before any of its files is opened."""
    ordered = sorted(points, reverse=True)
    n = first_current(index, [point.n for point in ordered])
    return next((point for point in ordered if point.n == n), None)


def longest(index: Index, prompt: Prompt) -> int:
    """Tokens that are stored, whether or not they can be restored.

    In whole segments, where these have no rows of their own.
    """
    walk = _Walk(index, prompt, WindowCoverage(window=0))
    found = max((visit.common for visit in walk.whole()), default=0)
    parting = walk.parting(found, prompt.length)
    return max(found, *(visit.common for visit in parting), 0)


def _restore_point(
    index: Index,
    visit: _Visit,
    layout: StateLayout,
    selection: Selection,
    need: WindowCoverage,
) -> Found | None:
    row = visit.row
    if layout.full_only:
        position = min(visit.common, selection.limit)
        if selection.exact is not None:
            position -= position % selection.exact.chunk
    else:
        position = row.end
        if layout.has(BlobClass.STATE) and not row.has(BlobClass.STATE):
            return None
        if not need.is_met(visit.covered_from, row.end):
            return None
        if selection.exact is not None and position % selection.exact.chunk:
            return None
    if not visit.start < position <= selection.limit:
        return None
    used = index.recency(row.n, row.used)
    return Found(position, visit.facts.cold, visit.facts.local, used, row.n)


class _Walk:
    """One walk; `parting` has what `whole` has passed by."""

    def __init__(self, index: Index, prompt: Prompt, need: WindowCoverage) -> None:
        self._index = index
        self._prompt = prompt
        self._need = need
        namespace = prompt.namespace
        self._keys = KeyChain(namespace.identity.digest, namespace.block_size)
        self._facts: dict[str, _Facts] = {}
        self._left: list[tuple[_Row, _Facts, int, int]] = []
        within = prompt.selection.within
        self._within = None if within is None else self._only(within)

    def whole(self) -> Iterator[_Visit]:
        """Nodes whose tokens are all the prompt's."""
        asked = min(self._prompt.selection.limit, self._prompt.length)
        stack = [(ROOT_ROW, 0, 0)]
        while stack:
            parent, start, above = stack.pop()
            if start >= asked:
                continue
            offset = start * TOKEN_SIZE
            first = first_token(self._prompt.tokens[offset : offset + TOKEN_SIZE])
            for row in self._children(parent, start, first):
                # A planted row might end where it starts.
                if row.first_token != first or row.end <= start:
                    continue
                facts = self._facts_of(row.claims)
                if self._prompt.selection.exact is not None and not facts.exact:
                    continue
                if not self._fits(row):
                    self._left.append((row, facts, start, above))
                    continue
                present = row.has(BlobClass.WINDOW)
                covered = self._need.covered_from(
                    above, start, row.end, present=present
                )
                yield _Visit(row, facts, start, row.end, covered)
                stack.append((row.n, row.end, covered))

    def parting(self, least: int, limit: int) -> Iterator[_Visit]:
        """Nodes that the prompt leaves behind `least`, or there; up to `limit`.

        To be called when all of `whole` was taken.
        """
        left = sorted(self._left, key=lambda one: (one[0].end, one[0].n), reverse=True)
        reach = min(limit, self._prompt.length)
        some = [one for one in left if min(one[0].end, reach) >= max(least, 1)]
        for row, facts, start, above in some[:FEW]:
            if (common := self._common(row, start)) > start:
                yield _Visit(row, facts, start, common, above)

    def _fits(self, row: _Row) -> bool:
        if row.end > self._prompt.length:
            return False
        return self._keys.key(self._prompt.tokens, row.end) == row.key

    def _children(self, parent: int, start: int, first: int) -> Sequence[_Row]:
        """Children that may fit, or go along: all of them, unless they are many."""
        if self._within is not None:
            return self._within.get(parent, ())
        ns = self._prompt.ns
        rows = self._index.all(_CHILDREN, (ns, parent, FEW + 1))
        if len(rows) > FEW:
            rows = self._index.all(_PARTING, (ns, parent, first, FEW))
            known = {row[1] for row in rows}
            rows += [r for r in self._whole_of_many(parent, start) if r[1] not in known]
        return [_Row(*row) for row in rows]

    def _whole_of_many(self, parent: int, start: int) -> Iterator[tuple[object, ...]]:
        """Children that fit: one step of the index for each end that there is."""
        ns, end = self._prompt.ns, start
        while True:
            ((end,),) = self._index.all(_NEXT_END, (ns, parent, end))
            if end is None or end > self._prompt.length:
                return
            key = self._keys.key(self._prompt.tokens, end)
            yield from self._index.all(_WHOLE, (ns, parent, end, key))

    def _only(self, within: frozenset[NodeId]) -> dict[int, list[_Row]]:
        """The rows of some nodes, by their parents."""
        found = [self._index.find(self._prompt.ns, node) for node in within]
        children: dict[int, list[_Row]] = {}
        for values in self._index.all(_THESE, (json.dumps(found),)):
            row = _Row(*values)
            children.setdefault(row.parent, []).append(row)
        return children

    def _facts_of(self, claims: str) -> _Facts:
        if (facts := self._facts.get(claims)) is None:
            numbers = map(int, filter(None, claims.split(",")))
            said = [said for said in map(self._index.said, numbers) if said is not None]
            facts = self._facts[claims] = _facts(said, self._prompt.selection)
        return facts

    def _common(self, row: _Row, start: int) -> int:
        """The position up to which a node's tokens are the prompt's; 0 if unknown."""
        found = self._index.all(_ROWS_OF, (row.n, class_number(BlobClass.KV)))
        if not found:
            return 0
        ((digest, size, trailer),) = found
        stored = self._prompt.trailer(BlobRef(BlobClass.KV, digest, size, trailer))
        if len(stored) != (row.end - start) * TOKEN_SIZE:
            return 0
        # Under the same bytes may lie the ids of another node: the key tells.
        prefix = self._prompt.tokens[: start * TOKEN_SIZE]
        if self._keys.fork(start).key(prefix + stored, row.end) != row.key:
            return 0
        return start + _common_tokens(stored, self._prompt.tokens, start * TOKEN_SIZE)


def _facts(said: Sequence[Provenance], selection: Selection) -> _Facts:
    cold = [one for one in said if one.lineage is Lineage.COLD]
    exact, ours = selection.exact, frozenset([selection.local])
    return _Facts(
        cold=bool(cold),
        local=any(one.origins == ours for one in said),
        exact=exact is not None
        and any(o.origins == ours and o.numerics == exact.numerics for o in cold),
    )


def _common_tokens(stored: bytes, tokens: bytes, offset: int) -> int:
    """Whole tokens at the start of `stored` that stand at `offset` too."""
    if tokens.startswith(stored, offset):
        return len(stored) // TOKEN_SIZE
    low, high = 0, min(len(stored), len(tokens) - offset) // TOKEN_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        # Up to `low` they are the same: each byte is copied and compared once.
        part = stored[low * TOKEN_SIZE : middle * TOKEN_SIZE]
        if tokens.startswith(part, offset + low * TOKEN_SIZE):
            low = middle
        else:
            high = middle - 1
    return low
