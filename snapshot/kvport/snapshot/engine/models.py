"""Models: found, loaded, probed, and named by what they are.

A model whose state is of a kind that we do not carry is served without the cache, one
that cannot be batched one sequence at a time; both say why.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import attrs
import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_module
from mlx_lm.utils import load_tokenizer

from kvport.manifest.errors import KvportError
from kvport.manifest.identity import StateIdentity
from kvport.manifest.layout import StateLayout
from kvport.manifest.limits import MIB
from kvport.snapshot.engine.local_identity import (
    FileDigests,
    state_identity,
    tokenizer_digest,
)
from kvport.snapshot.engine.source import directory_at
from kvport.snapshot.errors import ModelLoadError, UnsupportedModelError
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import probe
from kvport.snapshot.state.untyped import Model as Module

T = TypeVar("T")

_PART: Final = 256 * MIB
"""Bytes of weights that are read at once: what else the thread does waits for them."""
_HUB_PATTERNS = [
    "*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja",
]  # fmt: skip


@attrs.frozen(eq=False)
class Model:
    """A loaded model.

    Attributes:
        name: what requests call it.
        directory: its files.
        module: the mlx module.
        tokenizer: mlx-lm's wrapper.
        tokenizer_digest: see local_identity.
        vocabulary: token ids are below this.
        nbytes: bytes of its weights.
        end_tokens: ids that end a reply.
        layout: its state's layout; None if it runs without the cache.
        identity: its state identity; None with the layout.
        refusal: why it runs without the cache, or None.
        alone: why its sequences run one at a time, or None.
    """

    name: str
    directory: Path
    module: Any
    tokenizer: Any
    tokenizer_digest: str
    vocabulary: int
    nbytes: int
    end_tokens: tuple[int, ...]
    layout: StateLayout | None
    identity: StateIdentity | None
    refusal: str | None
    alone: str | None


def locate(source: str) -> tuple[str, Path]:
    """(name, directory) of a model: a local directory, or a Hugging Face id.

    Raises:
        ModelLoadError: there is no such model.
    """
    if (directory := directory_at(source)) is not None:
        return directory.name, directory
    try:
        found = Path(snapshot_download(source, allow_patterns=_HUB_PATTERNS))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = f"no such directory, and not to be downloaded ({type(error).__name__})"
        raise ModelLoadError(f"{source}: {reason}") from error
    return source.rstrip("/").rsplit("/", 1)[-1], found


class Run(Protocol):
    """Runs a piece of work in the thread that owns mlx; answers what it returns."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Run it."""


def _here(work: Callable[[], T], /) -> T:
    return work()


def load_model(
    name: str,
    directory: Path,
    files: FileDigests,
    kv_form: KvForm | None = None,
    *,
    run: Run = _here,
) -> Model:
    """Load a model from its directory and probe it.

    What mlx computes is done in pieces, each by one call of `run`; tokenizer and
    digests, which take as long, in the calling thread.

    Args:
        name: what requests will call it.
        directory: its files.
        files: remembered digests.
        kv_form: of keys and values, if it is not to be the model's own.
        run: where mlx work is done; the calling thread by default.

    Raises:
        ModelLoadError: mlx-lm cannot load it.
        KvportError: as `run` raises it.
    """
    try:
        module, config = run(lambda: load_module(directory, lazy=True))
        for part in _parts(module):
            run(partial(mx.eval, part))
        tokenizer = load_tokenizer(
            directory, eos_token_ids=config.get("eos_token_id", None)
        )
    except KvportError:
        raise
    except Exception as error:
        # mlx-lm lets through whatever a model's files make its code raise.
        raise ModelLoadError(f"mlx-lm cannot load {name}: {error}") from error
    layout, identity, refusal, alone = None, None, None, None
    try:
        found = run(lambda: probe(module, kv_form))
        layout, alone = found.layout, found.alone
        identity = state_identity(directory, config, layout, files, kv_form=kv_form)
    except UnsupportedModelError as error:
        # What we do not know may not be batched either.
        layout, refusal, alone = None, error.message, error.message
    text = config.get("text_config", config)
    return Model(
        name=name,
        directory=directory,
        module=module,
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(directory, files),
        vocabulary=int(text.get("vocab_size") or len(tokenizer)),
        nbytes=sum(array.nbytes for array in _weights(module)),
        end_tokens=tuple(sorted(tokenizer.eos_token_ids)),
        layout=layout,
        identity=identity,
        refusal=refusal,
        alone=alone,
    )


def _weights(module: Module) -> list[mx.array]:
    found = (array for _, array in tree_flatten(module.parameters()))
    return [array for array in found if isinstance(array, mx.array)]


def _parts(module: Module) -> Iterator[list[mx.array]]:
    """A module's weights, not read yet, in parts of about the same size."""
    part: list[mx.array] = []
    for array in _weights(module):
        part.append(array)
        if sum(one.nbytes for one in part) >= _PART:
            yield part
            part = []
    if part:
        yield part
