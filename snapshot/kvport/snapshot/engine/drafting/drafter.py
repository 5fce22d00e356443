"""What proposes tokens before the model has computed them.

A draft is a guess: a wrong one costs time, never the reply. The model verifies all of a
proposal in one evaluation and keeps what it would have said itself.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import attrs


class Drafter(Protocol):
    """Proposes the continuation of one sequence; called in the engine's thread."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Guess what comes next.

        Args:
            tokens: the prompt and the reply so far. From call to call it only grows;
                what was proposed before may or may not be part of it.
            count: how many tokens to propose at most, 1 or more.

        Returns:
            Token ids, possibly none.
        """


DrafterFactory: TypeAlias = Callable[[], Drafter]
"""Makes the drafter of a new sequence."""


@attrs.frozen
class DraftSource:
    """Where guesses come from, as a setting.

    Attributes:
        model: directory of a draft model; None looks them up in the text itself.
        tokens: guesses in one verify, at most.
    """

    model: Path | None = None
    tokens: int = 8


@attrs.frozen
class Drafting:
    """How a model's sequences are drafted.

    Attributes:
        drafter: makes the drafter of a new sequence.
        block_size: no verify reaches beyond a multiple of this many tokens.
        draft_tokens: guesses in one verify, at most.
        nbytes: bytes of the draft model's weights.
    """

    drafter: DrafterFactory
    block_size: int = 256
    draft_tokens: int = 8
    nbytes: int = 0
