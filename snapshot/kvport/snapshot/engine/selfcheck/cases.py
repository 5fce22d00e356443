"""What selfcheck restores, as data: origins store state, their cases restore it."""

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from kvport.manifest.identity import PointKind
from kvport.snapshot.engine.requests import Policy

REPLY: Final = 37
"""Tokens that an origin generates; 7 more for each that joined before it ends."""

_PERIOD: Final = 16
"""Tokens after which a prompt repeats itself, if there is something to guess."""
_TURN: Final = 3
"""Tokens of the next turn, after a reply."""


@attrs.frozen
class Case:
    """A kind of restore point, and the prompt that restores there.

    Attributes:
        name: what reports call it.
        point: the kind of point that `nearest` restores.
    """

    name: str
    point: PointKind

    def position(self, prompt: int, reply: int, *, chunk: int, policy: Policy) -> int:
        """Tokens that must be restored of a stored request.

        Under `exact` the last chunk multiple before the prompt's last token: what comes
        after it was decoded, or computed in a chunk of another length.

        Args:
            prompt: the stored prompt's length.
            reply: the stored reply's length.
            chunk: tokens evaluated at once; the stride is the same.
            policy: the policy of the request that restores.
        """
        if self.point is PointKind.STRIDE:
            return (prompt - 2) // chunk * chunk
        if policy is Policy.EXACT:
            return (prompt - 1) // chunk * chunk
        return prompt - 1 if self.point is PointKind.PROMPT else prompt + reply

    def follow(
        self,
        prompt: Sequence[int],
        reply: Sequence[int],
        *,
        chunk: int,
        vocabulary: int,
    ) -> list[int]:
        """The prompt of the request that restores.

        `stride` parts from the stored prompt right at the point, `prompt` is the stored
        one, `reply` is the conversation's next turn.
        """

        def other(tokens: Sequence[int]) -> list[int]:
            return [(token + 1) % vocabulary for token in tokens]

        match self.point:
            case PointKind.STRIDE:
                at = (len(prompt) - 2) // chunk * chunk
                return [*prompt[:at], *other(prompt[at:])]
            case PointKind.PROMPT:
                return list(prompt)
            case _:
                return [*prompt, *reply, *other(prompt[:_TURN])]


@attrs.frozen(kw_only=True)
class Origin:
    """Requests that store the state which cases restore.

    Attributes:
        cases: where what they stored is restored, each.
        requests: how many; each joins while those before it decode.
        drafted: whether replies are drafted. State is restored, and continued, by an
            engine without. The prompts repeat themselves, to give something to guess.
    """

    cases: tuple[Case, ...]
    requests: int = 1
    drafted: bool = False

    def lengths(self, tokens: int, chunk: int) -> list[tuple[int, int]]:
        """(prompt, reply) lengths, all different; every prompt is above a chunk.

        The first reply is the longest, so that the others join while it is decoded.
        """
        spread = (tokens - chunk - 1) // self.requests
        return [
            (tokens - i * spread, REPLY + 7 * (self.requests - 1 - i))
            for i in range(self.requests)
        ]

    def prompt(
        self, length: int, vocabulary: int, generator: np.random.Generator
    ) -> list[int]:
        """A random prompt."""
        period = min(length, _PERIOD) if self.drafted else length
        once: list[int] = generator.integers(vocabulary, size=period).tolist()
        return (once * -(-length // period))[:length]


ORIGINS: Final = (
    Origin(
        cases=(
            Case("stride", PointKind.STRIDE),
            Case("prompt", PointKind.PROMPT),
            Case("reply", PointKind.REPLY),
        )
    ),
    Origin(cases=(Case("batched", PointKind.REPLY),), requests=3),
    Origin(cases=(Case("drafted", PointKind.REPLY),), drafted=True),
)

CASE_NAMES: Final = tuple(case.name for origin in ORIGINS for case in origin.cases)
