"""A llama whose KV cache has an exact number of bytes per token."""

import itertools
from typing import Final

from kvport.snapshot.engine.builder.configs import Config
from kvport.snapshot.errors import ModelBuildError

MAX_LAYERS: Final = 256

# Keys and values in float32, and rotary embedding needs an even head dimension.
_STEP: Final = 2 * 4 * 2
_USUAL_HEAD_DIM: Final = 128
_MAX_HEAD_DIM: Final = 4096
# transformers wants the width to be a multiple of the heads, and the projections have
# width x KV size weights: few heads keep a large KV cache affordable.
_MAX_HEADS: Final = 32
_MIN_WIDTH: Final = 32


def sized_llama(kv_bytes: int, layers: int | None) -> Config:
    """Layers, heads and widths of a llama with `kv_bytes` of KV cache per token.

    Args:
        kv_bytes: over all layers, keys and values in float32.
        layers: number of layers; if not given, 4, 2 or 1, whichever fits first.

    Raises:
        ModelBuildError: no such model; the message names the nearest size.
    """
    choices = (layers,) if layers is not None else (4, 2, 1)
    for count in choices:
        heads = _heads(kv_bytes, count)
        if heads is not None:
            return {
                "num_hidden_layers": count,
                "hidden_size": heads * -(-_MIN_WIDTH // heads),
                "head_dim": kv_bytes // (count * 8 * heads),
                # As many as KV heads: the least that attention can compute.
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
            }
    raise ModelBuildError(
        f"no llama has {kv_bytes} bytes of KV cache per token;"
        f" the nearest has {_nearest(kv_bytes, choices)}"
    )


def _heads(kv_bytes: int, layers: int) -> int | None:
    """Fewest KV heads of a usual dimension, else most heads; none if nothing fits."""
    pairs, rest = divmod(kv_bytes, layers * _STEP)
    if rest or pairs < 1:
        return None
    fitting = [
        heads
        for heads in range(1, _MAX_HEADS + 1)
        if pairs % heads == 0 and 2 * pairs // heads <= _MAX_HEAD_DIM
    ]
    usual = [heads for heads in fitting if 2 * pairs // heads <= _USUAL_HEAD_DIM]
    return next(iter(usual or reversed(fitting)), None)


def _nearest(kv_bytes: int, choices: tuple[int, ...]) -> int:
    step = min(choices) * _STEP
    largest = max(choices) * 8 * _MAX_HEADS * _MAX_HEAD_DIM
    wanted = min(max(kv_bytes, step), largest)
    middle = (wanted + step // 2) // step * step
    # Outwards; ends at the latest at `step`: one head of two dimensions per layer.
    return next(
        size
        for distance in itertools.count(0, step)
        for size in sorted(
            (middle - distance, middle + distance), key=lambda size: abs(size - wanted)
        )
        if any(_heads(size, layers) for layers in choices)
    )
