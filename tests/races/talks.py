"""Conversations that clients share: several may go on with one at the same time."""

import random
import threading

import attrs

VOCABULARY = 256
"""Token ids below it are bytes, in all of the tiny models."""
_SYSTEMS = 3
_LONGEST = 640
"""Tokens of a history; a conversation that has as many is not gone on with."""


@attrs.frozen
class Talk:
    """A history, as token ids: what was asked, and what was answered."""

    model: str
    tokens: tuple[int, ...]


class Talks:
    """All histories of one storm; thread-safe."""

    def __init__(self, seed: int, models: tuple[str, ...], kept: int = 60) -> None:
        rng = random.Random(seed)
        self._systems = [_fresh(rng, 130 + 37 * n) for n in range(_SYSTEMS)]
        self._models = models
        self._kept = kept
        self._lock = threading.Lock()
        self._known: list[Talk] = []

    def new(self, rng: random.Random) -> Talk:
        """The first prompt of a conversation; many begin with the same instructions."""
        head = rng.choice(self._systems) if rng.random() < 0.8 else ()
        asked = _fresh(rng, rng.randrange(5, 200))
        return Talk(rng.choice(self._models), (*head, *asked))

    def next(self, rng: random.Random) -> Talk:
        """The next prompt of a conversation, or one that was there already."""
        old = self.known(rng)
        if old is None or len(old.tokens) > _LONGEST:
            return self.new(rng)
        if rng.random() < 0.2:
            return old
        return attrs.evolve(
            old, tokens=(*old.tokens, *_fresh(rng, rng.randrange(3, 90)))
        )

    def known(self, rng: random.Random) -> Talk | None:
        """A history; newer ones more often."""
        with self._lock:
            if not self._known:
                return None
            return self._known[int(len(self._known) * max(rng.random(), rng.random()))]

    def add(self, talk: Talk) -> None:
        """Remember a history, and forget the oldest."""
        with self._lock:
            self._known.append(talk)
            del self._known[: -self._kept]


def _fresh(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
