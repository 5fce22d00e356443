"""What is said in the demonstration: a long document, a question, and one more."""

import itertools
from typing import Any, Final

Messages = list[dict[str, Any]]

_SENTENCES: Final = (
    "The prefix of a conversation hardly ever changes from one turn to the next.",
    "Whoever computes it again pays for every token of it once more.",
    "A state that was computed once can be kept, signed, and carried elsewhere.",
    "Nothing is believed that was not signed by a key on the list.",
    "What is restored continues to the very same numbers, to the last bit.",
)


def long_prompt(characters: int) -> Messages:
    """A chat of one question about a document of this length."""
    numbered = (
        f"{number}. {sentence}\n"
        for number, sentence in enumerate(itertools.cycle(_SENTENCES), start=1)
    )
    text = ""
    while len(text) < characters:
        text += next(numbered)
    return [
        {"role": "system", "content": "Answer from the document alone."},
        {"role": "user", "content": f"{text[:characters]}\n\nWhat does it say?"},
    ]


def next_turn(messages: Messages, reply: str) -> Messages:
    """The conversation with the reply, and a further question."""
    return [
        *messages,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And what follows from that?"},
    ]
