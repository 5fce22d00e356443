"""What the configurations of the tiny models have in common.

Widths are tiny and windows short (48 to 64 rows), so that tests pass them quickly. What
counts is the kind of each layer's cache, and that the kinds mix as in real models.
"""

from collections.abc import Callable
from typing import Final

import attrs

from kvport.snapshot.engine.builder.tokenizer import VOCABULARY_SIZE

Config = dict[str, object]

WIDTH: Final = 64
WINDOW: Final = 48
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"

COMMON: Final[Config] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@attrs.frozen
class Architecture:
    """One entry of the table.

    Attributes:
        config: config.json for a number of layers, without model_type.
        cache: what the layers' caches are, in words.
        tied: the output head is the embedding.
        model_type: mlx-lm's name, where it is not the name in the table.
        least: fewest layers that mlx-lm takes: one of each kind, mostly.
    """

    config: Callable[[int], Config]
    cache: str
    tied: bool = False
    model_type: str | None = None
    least: int = 1


def alternate(layers: int, period: int, often: str, last: str) -> list[str]:
    """Layer types in which every `period`th is `last` and all others `often`."""
    return [last if (i + 1) % period == 0 else often for i in range(layers)]


def dense(layers: int) -> Config:
    """Full attention in every layer, and a feed-forward block."""
    return COMMON | {"num_hidden_layers": layers, "head_dim": 16}


def windowed(layers: int, period: int = 4) -> Config:
    """Sliding windows, with full attention in every `period`th layer."""
    return dense(layers) | {
        "sliding_window": WINDOW,
        "layer_types": alternate(layers, period, SLIDING, FULL),
    }
