"""What was answered and what is stored, held to computations from nothing.

In: a node on the home that a server has left. Out: nothing, or an assertion fails.

* An answer under `exact`, and state that `exact` would restore, equal those of an empty
  cache, bit for bit.
* All other state was computed beside other requests, and in other pieces: it may differ
  by rounding, which is orders of magnitude less than what another prompt's differs by.
"""

import queue
import random
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.records import ExactRule, Match, Namespace, Selection
from kvport.snapshot.engine.requests import Failed, Generated, Policy, Request
from kvport.snapshot.engine.selfcheck.hot import canonical
from kvport.snapshot.engine.steps import Live
from kvport.snapshot.node import Node
from kvport.snapshot.state.blobs import Assembly
from tests.cache.builder import stored_tokens
from tests.races.world import Answered

ROUNDING = 2e-4
"""Between states, relative to the largest value of a leaf; between log-probabilities.
Those of other prompts are apart by more than 0.01."""

State = list[np.ndarray]


@attrs.define
class _Run:
    tokens: list[int] = attrs.field(factory=list)
    rows: list[np.ndarray] = attrs.field(factory=list)
    seen: dict[int, State] = attrs.field(factory=dict)


@attrs.frozen
class Oracle:
    """Computes on one node, from nothing."""

    node: Node

    def check_answers(self, answers: Sequence[Answered], rng: random.Random) -> None:
        """Hold answers to what an empty cache answers."""
        for one in answers:
            reply, prompt = one.answer.tokens, list(one.talk.tokens)
            if one.exact:
                cold = self._cold(one.talk.model, prompt, steps=len(reply))
                assert tuple(cold.tokens) == reply
                logprobs = [
                    float(row[token])
                    for row, token in zip(cold.rows, reply, strict=True)
                ]
                assert tuple(logprobs) == one.answer.logprobs
            else:
                at = rng.randrange(len(reply))
                cold = self._cold(one.talk.model, [*prompt, *reply[:at]], steps=1)
                # The likeliest token's: which one that is, rounding may decide.
                found, expected = one.answer.logprobs[at], float(cold.rows[0].max())
                assert abs(found - expected) < ROUNDING, one

    def check_stored(self) -> tuple[int, int]:
        """Restore every point of every path; how many there are, and how many cold."""
        found = cold = 0
        for name in self.node.engine.models:
            store = self.node.engine.store(name)
            assert store is not None
            for path, tokens in self._paths(store.namespace):
                ends = {node.end for node in path}
                points = {
                    (end, exact): match
                    for end in sorted(ends)
                    for exact in (False, True)
                    if (match := self._match(store.namespace, path, tokens, end, exact))
                    is not None
                    and match.position == end
                }
                run = self._states(name, tokens, {end for end, _ in points})
                for (end, exact), match in points.items():
                    restored = self._restored(store.namespace, match)
                    self._compare(restored, run[end], exact=exact)
                    found, cold = found + 1, cold + exact
        return found, cold

    def _paths(self, ns: Namespace) -> Iterator[tuple[tuple, list[int]]]:
        """All paths to leaves, with their tokens."""
        with self.node.volume.using() as cache:
            leaves = cache._index.all(
                "SELECT node.id FROM node JOIN ns ON ns.n = node.ns"
                " WHERE ns.id = ? AND node.children = 0",
                (ns.id,),
            )
            for (leaf,) in leaves:
                path = cache.path(ns, leaf)
                tokens = np.frombuffer(stored_tokens(cache, ns, path), "<u4")
                yield path, tokens.tolist()

    def _match(
        self, ns: Namespace, path: tuple, tokens: list[int], end: int, exact: bool
    ) -> Match | None:
        numerics = self.node.engine.numerics
        rule = ExactRule(numerics.chunk, numerics) if exact else None
        chosen = Selection(
            limit=end,
            local=self.node.key_id,
            exact=rule,
            within=frozenset(one.id for one in path),
        )
        with self.node.volume.using() as cache:
            return cache.match(ns, encode_tokens(tokens), chosen, count=False)

    def _restored(self, ns: Namespace, match: Match) -> State:
        assembly = Assembly(ns.layout, match.position)
        with self.node.volume.using() as cache:
            for one in match.nodes:
                for ref in one.blobs:
                    if assembly.wants(ref.blob_class, one.start, one.end):
                        data = memoryview(cache.read(ns, ref))
                        assembly.add(ref.blob_class, one.start, one.end, data)
        return self.node.engine.call(
            lambda: _arrays(ns, Live(assembly.caches(), 0, match.position))
        )

    def _states(self, name: str, tokens: list[int], ends: set[int]) -> dict[int, State]:
        """States at these positions; most of them lie where prefill stops anyway."""
        seen: dict[int, State] = {}
        for end in sorted(ends, reverse=True):
            if end not in seen:
                # Not what comes after: the token there is any.
                wanted = {one for one in ends if one <= end}
                seen |= self._cold(name, [*tokens[:end], 0], steps=1, ends=wanted).seen
        return seen

    def _cold(
        self, name: str, tokens: list[int], *, steps: int, ends: set[int] = frozenset()
    ) -> _Run:
        run, events = _Run(), queue.SimpleQueue()
        store = self.node.engine.store(name)

        def tap(live: Live) -> None:
            if live.held in ends:
                run.seen[live.held] = _arrays(store.namespace, live)

        request = Request(
            tokens=tokens,
            max_tokens=steps,
            ignore_eos=True,
            full_logprobs=True,
            policy=Policy.EXACT,
            read=False,
            write=False,
        )
        self.node.engine.submit(name, request, events.put, tap)
        while len(run.tokens) < steps:
            match events.get(timeout=60):
                case Generated(token=token, full=full):
                    run.tokens.append(token)
                    run.rows.append(full)
                case Failed(error=error):
                    raise error
        return run

    def _compare(self, found: State, expected: State, *, exact: bool) -> None:
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            if exact:
                assert one.tobytes() == other.tobytes()
            elif one.size:
                scale = max(1.0, float(np.abs(other).max()))
                assert float(np.abs(one - other).max()) <= ROUNDING * scale


def _arrays(ns: Namespace, live: Live) -> State:
    """A state in canonical form; in the engine's thread."""
    return [np.array(leaf) for leaves in canonical(ns.layout, live) for leaf in leaves]
