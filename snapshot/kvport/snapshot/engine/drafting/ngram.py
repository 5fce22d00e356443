"""Prompt lookup: what followed when the text's last tokens stood there before.

No second model. It pays where a reply repeats its prompt or itself: edits of a file,
quotes, tables, code.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

_LONGEST: Final = 8
_SIZES: Final = range(2, _LONGEST + 1)
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with bits all over: 2^64 divided by the golden ratio."""


class NgramDrafter:
    """Follows the latest earlier occurrence of the longest n-gram at the text's end.

    The index grows with the text: a step costs as much as there are new tokens times
    sizes of n-grams, however long the text is. It holds hashes only, about 1 KB per
    token of text: two n-grams of one hash, one in 2^64, make a bad guess.
    """

    def __init__(self) -> None:
        self._ends: Final[dict[int, dict[int, int]]] = {n: {} for n in _SIZES}
        """By size: from an n-gram's hash to where it last ended."""
        self._indexed = 0
        """N-grams that end here or before are in the index."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`."""
        length = len(tokens)
        first = max(0, self._indexed + 1 - _LONGEST)
        new = np.array(tokens[first:], np.uint64)
        hashes, found = new, None
        for size in _SIZES:
            if len(new) < size:
                break
            hashes = hashes[:-1] * _FACTOR + new[size - 1 :]
            *before, last = hashes.tolist()
            # The n-gram at the end goes into the index with the next token: it must
            # not find itself.
            self._ends[size].update(
                zip(before, range(first + size, length), strict=True)
            )
            found = self._ends[size].get(last, found)
        self._indexed = length - 1
        return [] if found is None else _continue(tokens, found, count)


def _continue(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """The tokens from `start` on; past the end the copy is copied on."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
