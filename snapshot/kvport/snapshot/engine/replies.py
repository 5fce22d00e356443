"""Text of a reply, token by token: detokenised, and ended by stop texts."""

from collections.abc import Sequence

import attrs

from kvport.snapshot.state.untyped import Detokenizer


@attrs.frozen
class Piece:
    """Text that became certain, and whether a stop text was met."""

    text: str
    stopped: bool


class ReplyText:
    """One reply's text; text that may begin a stop text is held back."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, token: int) -> Piece:
        """One more token."""
        self._detokenizer.add_token(token)
        return self._take(self._detokenizer.last_segment)

    def end(self) -> Piece:
        """No more tokens: give out what was held back."""
        self._detokenizer.finalize()
        piece = self._take(self._detokenizer.last_segment)
        if piece.stopped:
            return piece
        rest, self._held = self._held, ""
        return Piece(piece.text + rest, stopped=False)

    def _take(self, text: str) -> Piece:
        self._held += text
        found = [i for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return Piece(text, stopped=True)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Piece(text, stopped=False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
