"""The ends of replies, kept in memory until it is known whether they are worth storing.

A reply's end is a restore point, and usually the next turn begins there within seconds
and makes a point of its own: then only the rows are stored, with that turn. A template
that drops the reply's reasoning makes the next turn begin at the fork instead: then the
tail is never needed. So a `Tail` is stored when nothing came for a while, before an
export, and at the end; until then it serves lookups from memory. What has expired while
it waited does neither: its life begins with its last use, as that of all that the
request has stored.
"""

from collections.abc import Callable, Collection
from typing import Final

import attrs

from kvport.manifest.identity import KeyId
from kvport.manifest.layout import StateLayout
from kvport.manifest.limits import GIB
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.cache import Chain
from kvport.snapshot.cache.clock import boot_seconds
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.engine.taken import Taken

_BYTES: Final = GIB
"""Of all tails of a model; beyond it the oldest is stored at once."""
_LEAST_WAIT: Final = 0.05
"""Seconds: what is due may be held up for as long as a prompt is computed."""


@attrs.frozen(eq=False, kw_only=True)
class Tail:
    """One reply's end.

    Attributes:
        namespace: where it will be stored.
        chain: open; its tip is where the tail's rows begin.
        tokens: encoded ids of prompt and reply.
        prompt: tokens of the prompt.
        fork: where this prompt and its continuations part, if known.
        taken: its segments; the last one ends the reply.
        origins: issuers that any part of the state comes from.
    """

    namespace: Namespace
    chain: Chain
    tokens: bytes
    prompt: int
    fork: int | None
    taken: tuple[Taken, ...]
    origins: frozenset[KeyId]

    @property
    def position(self) -> int:
        """Tokens that it restores."""
        return self.taken[-1].end

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        leaves = (leaf for taken in self.taken for leaf in taken.leaves.values())
        return sum(array.nbytes for found in leaves for array in found.values())

    def superseded_by(self, tokens: bytes) -> bool:
        """Whether a longer prompt is the same conversation's next turn.

        One that goes on with another reply is of a sibling, unless the template drops
        replies anyway.
        """
        stable = self.position
        if self.fork is not None and self.fork < self.prompt - 1:
            stable = self.fork
        return len(tokens) > self.prompt * TOKEN_SIZE and tokens.startswith(
            self.tokens[: stable * TOKEN_SIZE]
        )

    def store(self, layout: StateLayout) -> None:
        """Append everything to the chain, unless it has expired, and end it."""
        for taken in self.taken:
            if self.chain.is_over:
                self.chain.lose(SkipReason.EXPIRED)
            else:
                self.chain.append(taken.segment(layout), late=True)
        self.chain.close()

    def drop(self) -> None:
        """End the chain without it."""
        self.chain.close()


class Tails:
    """One model's tails; every call in the engine's thread."""

    def __init__(self, idle: float, clock: Callable[[], float] = boot_seconds) -> None:
        """Store tails for which nothing comes in `idle` seconds, sleep included."""
        self._idle: Final = idle
        self._clock: Final = clock
        self._due: dict[Tail, float] = {}
        """When each is to be stored, by the boot clock; oldest first."""

    def add(self, tail: Tail) -> None:
        """Keep a tail; the oldest ones are stored if they are too many bytes."""
        self._due[tail] = self._clock() + self._idle
        while sum(tail.nbytes for tail in self._due) > _BYTES:
            self._store(next(iter(self._due)))

    def longest(self, tokens: bytes, limit: int) -> Tail | None:
        """The longest tail that a prompt begins with, of at most `limit` tokens."""
        fitting = [
            tail
            for tail in self._due
            if tail.position <= limit and tokens.startswith(tail.tokens)
        ]
        return max(fitting, key=lambda tail: tail.position, default=None)

    def supersede(self, tokens: bytes) -> int:
        """A prompt is stored with a point of its own: drop what it continues.

        Returns:
            How many tails were dropped.
        """
        gone = [tail for tail in self._due if tail.superseded_by(tokens)]
        for tail in gone:
            del self._due[tail]
            tail.drop()
        return len(gone)

    def store_due(self, is_continued: Callable[[Tail], bool]) -> None:
        """Store those for which nothing came in time.

        Args:
            is_continued: whether a prompt that will supersede it is being computed.
        """
        now = self._clock()
        for tail in [tail for tail, due in self._due.items() if due <= now]:
            if not is_continued(tail):
                self._store(tail)

    def store_all(self) -> None:
        """Store all of them now."""
        for tail in list(self._due):
            self._store(tail)

    def drop_from(self, keys: Collection[KeyId]) -> None:
        """Forget those that any of these keys has a part in."""
        for tail in [tail for tail in self._due if not tail.origins.isdisjoint(keys)]:
            del self._due[tail]
            tail.drop()

    def drop_all(self) -> None:
        """Forget all of them: what they hang on is about to be removed on purpose."""
        for tail in self._due:
            tail.drop()
        self._due.clear()

    @property
    def wait(self) -> float | None:
        """Seconds until one is due; None without any."""
        if not self._due:
            return None
        return max(_LEAST_WAIT, min(self._due.values()) - self._clock())

    def _store(self, tail: Tail) -> None:
        del self._due[tail]
        tail.store(tail.namespace.layout)
