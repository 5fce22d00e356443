"""Samplers: log-probabilities [batch, vocabulary] to tokens [batch]."""

import secrets
from typing import Final

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from kvport.snapshot.engine.requests import Sampling
from kvport.snapshot.engine.steps import Sampler

_GREEDY: Final = 1e-4
"""Below this temperature the likeliest token is drawn anyway, and float32 overflows."""
_LEAST_MASS: Final = 1e-6
"""A smaller top_p rounds away against 1, and would leave no token at all."""


def make_sampler(sampling: Sampling) -> Sampler | None:
    """A sampler with its own random state; None stands for greedy.

    Own keys make a seeded reply independent of its neighbours in the batch.
    """
    if sampling.temperature < _GREEDY:
        return None
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    key = mx.random.key(seed & ((1 << 64) - 1))

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, max(sampling.top_p, _LEAST_MASS))
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        key, now = mx.random.split(key)
        return mx.random.categorical(logprobs / sampling.temperature, key=now)

    return sample
