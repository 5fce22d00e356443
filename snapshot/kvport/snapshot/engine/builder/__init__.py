"""Tiny models with random weights, as directories that mlx-lm loads.

For tests, demonstrations and bug reports: every kind of layer without a download.
"""

from kvport.snapshot.engine.builder.architectures import ARCHITECTURES
from kvport.snapshot.engine.builder.build import KNOWN_ARCHITECTURES, build_model

__all__ = ["ARCHITECTURES", "KNOWN_ARCHITECTURES", "build_model"]
