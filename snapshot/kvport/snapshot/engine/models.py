"""Models: found, loaded, probed, and named by what they are.

A model whose state is of a kind that we do not carry is served without the cache, one
that cannot be batched one sequence at a time; both say why.
"""

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from kvport.manifest.identity import StateIdentity
from kvport.manifest.layout import StateLayout
from kvport.snapshot.engine.local_identity import (
    FileDigests,
    state_identity,
    tokenizer_digest,
)
from kvport.snapshot.errors import ModelLoadError, UnsupportedModelError
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.probe import probe

_HUB_PATTERNS = [
    "*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja",
]  # fmt: skip


@attrs.frozen(eq=False)
class Model:
    """A loaded model.

    Attributes:
        name: what requests call it.
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
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory.resolve().name, directory.resolve()
    try:
        found = Path(snapshot_download(source, allow_patterns=_HUB_PATTERNS))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = f"no such directory, and not to be downloaded ({type(error).__name__})"
        raise ModelLoadError(f"{source}: {reason}") from error
    return source.rstrip("/").rsplit("/", 1)[-1], found


def load_model(
    name: str,
    directory: Path,
    files: FileDigests,
    kv_form: KvForm | None = None,
) -> Model:
    """Load a model from its directory, in the calling thread, and probe it.

    Args:
        name: what requests will call it.
        directory: its files.
        files: remembered digests.
        kv_form: of keys and values, if it is not to be the model's own.

    Raises:
        ModelLoadError: mlx-lm cannot load it.
    """
    try:
        module, tokenizer, config = load(str(directory), return_config=True)
    except Exception as error:
        # mlx-lm lets through whatever a model's files make its code raise.
        raise ModelLoadError(f"mlx-lm cannot load {name}: {error}") from error
    layout, identity, refusal, alone = None, None, None, None
    try:
        found = probe(module, kv_form)
        layout, alone = found.layout, found.alone
        identity = state_identity(directory, config, layout, files, kv_form=kv_form)
    except UnsupportedModelError as error:
        # What we do not know may not be batched either.
        layout, refusal, alone = None, error.message, error.message
    parameters = [array for _, array in tree_flatten(module.parameters())]
    text = config.get("text_config", config)
    return Model(
        name=name,
        module=module,
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(directory, files),
        vocabulary=int(text.get("vocab_size") or len(tokenizer)),
        nbytes=sum(a.nbytes for a in parameters if isinstance(a, mx.array)),
        end_tokens=tuple(sorted(tokenizer.eos_token_ids)),
        layout=layout,
        identity=identity,
        refusal=refusal,
        alone=alone,
    )
