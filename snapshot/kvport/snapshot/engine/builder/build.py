"""Write a tiny model's directory: configuration, weights, tokenizer."""

import importlib
import json
from pathlib import Path
from typing import Final

import mlx.core as mx

from kvport.snapshot.engine.builder.architectures import ARCHITECTURES
from kvport.snapshot.engine.builder.configs import Config
from kvport.snapshot.engine.builder.directory import new_directory
from kvport.snapshot.engine.builder.kv_size import MAX_LAYERS, sized_llama
from kvport.snapshot.engine.builder.tokenizer import (
    IM_END,
    TEMPLATES,
    special_token_id,
    write_tokenizer,
)
from kvport.snapshot.engine.builder.weights import random_weights
from kvport.snapshot.errors import ModelBuildError

KNOWN_ARCHITECTURES: Final[tuple[str, ...]] = tuple(ARCHITECTURES)
"""Names that `build_model` takes: mlx-lm's `model_type`, or what its table says."""

_DEFAULT_LAYERS: Final = 4
_MAX_SEED: Final = 2**64 - 1


def build_model(
    arch: str,
    directory: Path,
    *,
    seed: int = 0,
    layers: int | None = None,
    kv_bytes_per_token: int | None = None,
    template: str = "chatml",
) -> None:
    """Write a tiny float32 model with random weights that `mlx_lm.load` reads.

    The same arguments give the same bytes. The directory appears all at once.

    Args:
        arch: one of `KNOWN_ARCHITECTURES`.
        directory: where to write; must not exist, or be empty.
        seed: 0 to 2^64 - 1.
        layers: number of layers, 4 by default; some architectures need 2 to 4.
        kv_bytes_per_token: exact size of the KV cache for one token over all layers,
            in bytes; llama only.
        template: name of a chat template, see `TEMPLATES`.

    Raises:
        ModelBuildError: an argument that cannot be met; the message says why.
    """
    if arch not in ARCHITECTURES:
        raise ModelBuildError(
            f"unknown architecture; known are {', '.join(KNOWN_ARCHITECTURES)}"
        )
    if template not in TEMPLATES:
        raise ModelBuildError(f"unknown template; known are {', '.join(TEMPLATES)}")
    if not 0 <= seed <= _MAX_SEED:
        raise ModelBuildError("the seed must be from 0 to 2^64 - 1")
    architecture = ARCHITECTURES[arch]
    least = architecture.least
    if layers is not None and not least <= layers <= MAX_LAYERS:
        raise ModelBuildError(
            f"the number of layers must be from {least} to {MAX_LAYERS}"
        )

    config = architecture.config(layers or _DEFAULT_LAYERS)
    if kv_bytes_per_token is not None:
        if arch != "llama":
            raise ModelBuildError("only llama takes a size of the KV cache")
        config |= sized_llama(kv_bytes_per_token, layers)
    config |= {
        "model_type": architecture.model_type or arch,
        "dtype": "float32",
        # Named all three: transformers warns of defaults outside of the vocabulary.
        "bos_token_id": None,
        "eos_token_id": special_token_id(IM_END),
        "pad_token_id": special_token_id(IM_END),
    }
    with new_directory(directory) as new:
        (new / "config.json").write_text(
            json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        _write_weights(new / "model.safetensors", config, seed, tied=architecture.tied)
        write_tokenizer(new, template)


def _write_weights(file: Path, config: Config, seed: int, *, tied: bool) -> None:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    # Parameter names are those after mlx-lm's `sanitize`, which leaves them alone.
    mx.save_safetensors(
        str(file), random_weights(model, seed, tied=tied), {"format": "mlx"}
    )
