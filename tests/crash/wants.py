"""What an operation has acknowledged: things that hold from then on, crash or not."""

import json
from typing import Any

import attrs


@attrs.frozen
class Want:
    """One acknowledgement.

    Attributes:
        kind: `stored`: a lookup of the tokens restores `position` at least; `gone`: it
            finds nothing; `root`: the cache has the id `name`; `artifact`: the ledger
            has the artifact `name`.
        name: of the space, if it is about tokens.
        tokens: ids of a prompt.
        position: how many of them are restored.
    """

    kind: str
    name: str
    tokens: tuple[int, ...] = ()
    position: int = 0

    def to_text(self) -> str:
        return json.dumps(attrs.astuple(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> "Want":
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, value: list[Any]) -> "Want":
        kind, name, tokens, position = value
        return cls(kind, name, tuple(tokens), position)
