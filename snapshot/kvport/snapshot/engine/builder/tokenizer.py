"""A tokenizer of one printable character per id, and two chat templates.

Any text over the alphabet survives encode and decode, and any generated text encodes
to the very ids that were generated (unless it spells out a special token, character by
character). So a reply that comes back as text in the next turn hits the cache.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models

VOCABULARY_SIZE: Final = 320
"""Ids of the tokenizer; each of them has a text."""

IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
THINK_START: Final = "<think>"
THINK_END: Final = "</think>"
SPECIAL_TOKENS: Final = (IM_START, IM_END, THINK_START, THINK_END)

UNKNOWN: Final = "\u25af"
"""White vertical rectangle: stands for every character outside of the alphabet."""

# ASCII first, so that the id of a printable ASCII character is its code minus 31. No
# combining and no right-to-left characters: what is shown is what was generated. None
# of U+00A1..U+0143 either, which byte-level decoders take for bytes.
_RANGES: Final = (
    (0x0A, 0x0A),
    (0x20, 0x7E),
    (0x391, 0x3A1),
    (0x3A3, 0x3A9),
    (0x3B1, 0x3C9),
    (0x400, 0x481),
    (0x14A, 0x17E),
)


def _characters() -> Iterator[str]:
    for first, last in _RANGES:
        yield from map(chr, range(first, last + 1))


ALPHABET: Final = "".join(
    itertools.islice(_characters(), VOCABULARY_SIZE - len(SPECIAL_TOKENS) - 1)
)
"""All characters that have an id of their own, in the order of their ids."""

# Later turns repeat what was generated, as it was generated.
_CHATML: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3's: the generation prompt opens the reasoning, and once a user has answered,
# the reasoning of earlier turns is gone. Two renders of one conversation part inside
# of the generation prompt.
_THINKING: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set text = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.last_user %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""

TEMPLATES: Final[dict[str, str]] = {"chatml": _CHATML, "thinking": _THINKING}
"""Chat templates by name.

`chatml` keeps all text of earlier turns; `thinking` drops their reasoning and lets the
generation prompt open a new one.
"""


def special_token_id(token: str) -> int:
    """Id of one of `SPECIAL_TOKENS`."""
    return len(ALPHABET) + 1 + SPECIAL_TOKENS.index(token)


def write_tokenizer(directory: Path, template: str) -> None:
    """Write tokenizer.json and tokenizer_config.json (which has the chat template).

    Args:
        directory: an existing model directory.
        template: one of `TEMPLATES`.
    """
    # Byte-pair encoding without a single merge: every character stays alone.
    characters = ALPHABET + UNKNOWN
    model = models.BPE(
        vocab={character: i for i, character in enumerate(characters)},
        merges=[],
        unk_token=UNKNOWN,
    )
    tokenizer = Tokenizer(model)
    # Without it the decoder would put spaces between the tokens.
    tokenizer.decoder = decoders.Fuse()
    # For some architectures (qwen3_5) transformers puts a byte-level pipeline of its
    # own in the place of the file's. Added tokens are matched before any pipeline and
    # come back verbatim; only unknown characters are dropped there, not marked.
    tokenizer.add_tokens([AddedToken(c, normalized=False) for c in characters])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[template],
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
