"""Parts of a stored path, computed again and compared.

In: a path that is stored here, whoever computed it. Out: for each part how far the
stored state is from what the model here computes on top of the part before. A part goes
from one restore point to the next, since only there can a computation begin and be
compared; where all layers keep their rows that is one segment.
"""

import itertools
from collections.abc import Sequence
from random import SystemRandom

import attrs

from kvport.manifest.layout import BlobClass, StateLayout
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace, NodeRecord
from kvport.snapshot.engine.comparison import difference, evaluate, joined
from kvport.snapshot.engine.restore import assemble
from kvport.snapshot.state import untyped
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import make_caches
from kvport.snapshot.state.rows import Leaves, take


@attrs.frozen
class Part:
    """Tokens [start, end) of a path, computed again.

    Attributes:
        difference: of the stored state from the computed one, relative to the largest
            value; 0 is bit for bit.
    """

    start: int
    end: int
    difference: float


def sample(ends: Sequence[int], count: int) -> list[tuple[int, int]]:
    """At most `count` of the ranges between restore points, first and last included.

    Which ones nobody knows beforehand, so that no others can be falsified.
    """
    ranges = list(itertools.pairwise([0, *ends]))
    if len(ranges) <= count:
        return ranges
    inner = SystemRandom().sample(ranges[1:-1], max(count - 2, 0))
    return sorted([ranges[0], *inner, ranges[-1]][:count])


@attrs.frozen(kw_only=True)
class Recomputer:
    """A stored path, and the model that is to compute it again.

    Attributes:
        cache: where the path is, leased.
        namespace: likewise.
        path: nodes from the root on.
        tokens: their ids.
        module: the model.
        kv_form: of keys and values.
    """

    cache: Cache
    namespace: Namespace
    path: Sequence[NodeRecord]
    tokens: Sequence[int]
    module: untyped.Model
    kv_form: KvForm | None

    def compute(self, part: tuple[int, int]) -> Part:
        """Compute a part again, from one restore point, or 0, to another one.

        Raises:
            DamagedError: a blob is not what was stored.
            GoneError: it was removed.
            StorageError: it could not be read.
        """
        start, end = part
        ours = self._stored(start) if start else make_caches(self.module, self.kv_form)
        evaluate(self.module, ours, self.tokens, part)
        layout = self.namespace.layout
        mine, theirs = (
            _leaves(layout, held, part) for held in (ours, self._stored(end))
        )
        return Part(start, end, difference(mine, theirs))

    def _stored(self, position: int) -> Sequence[untyped.Cache]:
        nodes = [node for node in self.path if node.start < position]
        return assemble(self.cache, self.namespace, nodes, position).caches()


def _leaves(
    layout: StateLayout, caches: Sequence[untyped.Cache], part: tuple[int, int]
) -> Leaves:
    (rows,), state = take(
        layout,
        caches,
        row=0,
        held=part[1],
        cuts=[part],
        state=layout.has(BlobClass.STATE),
    )
    return joined(rows, state)
