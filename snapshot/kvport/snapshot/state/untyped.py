"""Names for objects of mlx-lm, which publishes no types for them."""

from typing import Any, TypeAlias

Cache: TypeAlias = Any
"""A cache object of `mlx_lm.models.cache`, solo or batched."""

Model: TypeAlias = Any
"""A language model of `mlx_lm.models`."""

Tokenizer: TypeAlias = Any
"""mlx-lm's wrapper of a tokenizer."""
