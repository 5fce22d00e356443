"""The walk down the tree: which stored path restores the most of these tokens.

In: encoded tokens and a `Selection`. Out: the row of the path's last node and the
position. All variants are followed; every node that fits the tokens is visited once. A
node may have lost blobs that no point needed: what is left decides.
"""

from collections.abc import Iterator
from typing import Final

import attrs

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.index import ROOT_ROW, Index, first_token, origins_text
from kvport.snapshot.cache.records import Selection

_CHILDREN: Final = """
SELECT n, id, tokens, used,
    EXISTS (SELECT 1 FROM blob WHERE node = node.n AND class = 'state'),
    EXISTS (SELECT 1 FROM blob WHERE node = node.n AND class = 'window'),
    EXISTS (SELECT 1 FROM attest WHERE node = node.n AND lineage = 'cold'),
    EXISTS (SELECT 1 FROM attest WHERE node = node.n AND origins = :local),
    EXISTS (SELECT 1 FROM attest WHERE node = node.n AND lineage = 'cold'
            AND origins = :local AND numerics = :numerics)
FROM node WHERE ns = :ns AND parent = :parent AND first_token = :first
"""


@attrs.frozen
class _Visit:
    """A node that shares at least its first token with the prefix asked for."""

    n: int
    id: NodeId
    start: int
    end: int
    common: int
    """Tokens of the prefix that are stored up to here: `end` if all of the node's."""
    used: int
    has_state: bool
    covered_from: int
    """Window rows are stored from this position up to `end`, without a gap."""
    cold: bool
    local: bool
    exact: bool


@attrs.frozen(order=True)
class Found:
    """A restore point; greater is better: position, cold, made here, recency."""

    position: int
    cold: bool
    local: bool
    used: int
    n: int


def best(
    index: Index, ns: int, layout: StateLayout, tokens: bytes, selection: Selection
) -> Found | None:
    """The restore point that the selection prefers, None if it allows none."""
    need = WindowCoverage.of(layout)
    visits = _walk(index, ns, tokens, selection, need)
    found = (_restore_point(visit, layout, selection, need) for visit in visits)
    return max((f for f in found if f is not None), default=None)


def longest(index: Index, ns: int, tokens: bytes, selection: Selection) -> int:
    """Tokens that are stored, whether or not they can be restored."""
    visits = _walk(index, ns, tokens, selection, WindowCoverage(window=0))
    return max((visit.common for visit in visits), default=0)


def _restore_point(
    visit: _Visit, layout: StateLayout, selection: Selection, need: WindowCoverage
) -> Found | None:
    if layout.full_only:
        position = min(visit.common, selection.limit)
        if selection.exact is not None:
            position -= position % selection.exact.chunk
    else:
        position = visit.end if visit.common == visit.end else 0
        if layout.has(BlobClass.STATE) and not visit.has_state:
            return None
        if not need.is_met(visit.covered_from, visit.end):
            return None
        if selection.exact is not None and position % selection.exact.chunk:
            return None
    if not visit.start < position <= selection.limit:
        return None
    return Found(position, visit.cold, visit.local, visit.used, visit.n)


def _walk(
    index: Index, ns: int, tokens: bytes, selection: Selection, need: WindowCoverage
) -> Iterator[_Visit]:
    exact = selection.exact
    numerics = None if exact is None else index.numerics_row(exact.numerics)
    asked = min(selection.limit, len(tokens) // TOKEN_SIZE)
    stack = [(ROOT_ROW, 0, 0)]
    while stack:
        parent, start, above = stack.pop()
        if start >= asked:
            continue
        offset = start * TOKEN_SIZE
        for n, node, stored, used, state, window, cold, local, is_exact in index.all(
            _CHILDREN,
            {
                "ns": ns,
                "parent": parent,
                "first": first_token(tokens[offset : offset + TOKEN_SIZE]),
                "local": origins_text([selection.local]),
                "numerics": numerics,
            },
        ):
            if selection.within is not None and node not in selection.within:
                continue
            if exact is not None and not is_exact:
                continue
            end = start + len(stored) // TOKEN_SIZE
            visit = _Visit(
                n=n,
                id=node,
                start=start,
                end=end,
                common=start + _common_tokens(stored, tokens, offset),
                used=index.recency(n, used),
                has_state=bool(state),
                covered_from=need.covered_from(above, start, end, present=bool(window)),
                cold=bool(cold),
                local=bool(local),
                exact=bool(is_exact),
            )
            yield visit
            if visit.common == visit.end:
                stack.append((n, end, visit.covered_from))


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
