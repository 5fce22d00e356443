"""The tiny models: one per architecture of mlx-lm that we know, by name."""

from typing import Final

from kvport.snapshot.engine.builder.attention import ATTENTION
from kvport.snapshot.engine.builder.configs import Architecture
from kvport.snapshot.engine.builder.recurrent import RECURRENT

ARCHITECTURES: Final[dict[str, Architecture]] = ATTENTION | RECURRENT
