"""Random weights that depend on the seed and on nothing else.

Values come from uniform random bits by one subtraction and one product each, both
rounded as IEEE 754 prescribes: no library function whose last bit differs between
machines. So a model built on one machine is, byte for byte, the one built on another.
"""

import math
from typing import Final

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

_LOGIT_DEVIATION: Final = 3.0
_EMBEDDING_DEVIATION: Final = 1.0
# Small, or a tied model would find its last token again and say it for ever.
_TIED_DEVIATION: Final = 0.05
_EMBEDDINGS: Final = ("embed_tokens", "embeddings", "embedding")
_HEADS: Final = ("lm_head.weight", "head.weight")
_FINAL_NORMS: Final = ("model.norm.weight", "embedding_norm.weight")


def random_weights(model: nn.Module, seed: int, *, tied: bool) -> dict[str, mx.array]:
    """Random weights in float32 for all parameters of `model`, by name.

    Matrices keep the variance of their input, norms and other vectors are the model's
    own start values with a little noise, and the logits differ by several units: greedy
    text does not repeat one token, and nothing overflows over thousands of tokens.

    Args:
        model: a freshly made model; its parameters give names and shapes.
        seed: 0 to 2^64 - 1.
        tied: the output head is the embedding.
    """
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters), stream=mx.cpu)
    weights = {}
    for key, (name, start) in zip(keys, parameters, strict=True):
        with mx.stream(mx.cpu):
            noise = mx.random.uniform(shape=start.shape, key=key) - 0.5
            if name.endswith("A_log"):
                # Heads remember for a token, or for hundreds.
                weights[name] = 8.0 * noise - 2.0
            elif name.endswith(".bias"):
                # mlx's own start values are random.
                weights[name] = 0.25 * noise
            elif start.ndim >= 2:
                deviation = _deviation(name, start.shape, tied=tied)
                weights[name] = noise * (deviation * math.sqrt(12.0))
            elif tied and name.endswith(_FINAL_NORMS):
                gain = _LOGIT_DEVIATION / (_TIED_DEVIATION * math.sqrt(start.size))
                weights[name] = mx.full(start.shape, gain)
            else:
                weights[name] = start.astype(mx.float32) + 0.25 * noise
    mx.eval(weights)
    return weights


def _deviation(name: str, shape: tuple[int, ...], *, tied: bool) -> float:
    """Standard deviation of a matrix of this shape (outputs first)."""
    if any(part in _EMBEDDINGS for part in name.split(".")):
        return _TIED_DEVIATION if tied else _EMBEDDING_DEVIATION
    # Convolutions: (outputs, kernel, inputs). Stacked experts: inputs are last too.
    inputs = math.prod(shape[1:]) if ".conv" in name else shape[-1]
    gain = _LOGIT_DEVIATION if name.endswith(_HEADS) else 1.0
    return gain / math.sqrt(inputs)
