"""Prompt cache files of mlx-lm to artifacts and back, without a running node.

A conversion goes through the empty cache of a workbench: what comes from a stranger's
file is stored and exported like any state, and an artifact is imported like any other,
refused for whatever an import refuses. Only the home's keys are used.
"""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import BinaryIO, Final

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.identity import Lineage, Numerics, Provenance
from kvport.manifest.tokens import encode_tokens
from kvport.manifest.ustar import ENVELOPE_NAME
from kvport.snapshot.engine.convert import check_prompt, store_caches
from kvport.snapshot.engine.restore import assemble
from kvport.snapshot.engine.template import Message
from kvport.snapshot.errors import (
    BadPromptError,
    PromptCacheMismatchError,
)
from kvport.snapshot.prompts import Prompt, rendered
from kvport.snapshot.state.prompt_cache import read_prompt_cache
from kvport.snapshot.state.prompt_cache_writer import Form, write_prompt_cache
from kvport.snapshot.state.untyped import Tokenizer
from kvport.snapshot.transfer.exporter import Issue, open_export
from kvport.snapshot.workbench import Workbench

_UNKNOWN: Final = Numerics(
    mlx="unknown", device="unknown", gpu_family="", blas="", blas_threads=0,
    chunk=1, compile=True,
)  # fmt: skip
"""A prompt cache file does not say what computed it."""
_HEAD: Final = ENVELOPE_NAME.encode() + b"\0"


@attrs.frozen
class Converted:
    """What a conversion wrote.

    Attributes:
        artifact_id: of the artifact that was written or read.
        model: name of the model.
        tokens: tokens that the state holds.
    """

    artifact_id: ArtifactId
    model: str
    tokens: int


def is_artifact(file: BinaryIO) -> bool:
    """Whether a file begins as an artifact does; its position is at the start again."""
    file.seek(0)
    head = file.read(len(_HEAD))
    file.seek(0)
    return head == _HEAD


def wrap(bench: Workbench, file: BinaryIO, prompt: Prompt, to: BinaryIO) -> Converted:
    """Write a prompt cache file as an artifact.

    Nothing in such a file says which prompt it is of: that is the caller's word,
    which is checked by computing a part of it, or all where layers keep no rows. It
    may be longer than what the caches hold. Caches that do not count their tokens
    are taken to hold the whole prompt, messages as `mlx_lm.cache_prompt` has them.

    Raises:
        BadPromptError: the prompt is empty, or not in the model's vocabulary.
        PromptCacheError: the file is damaged, or none of mlx-lm's.
        PromptCacheMismatchError: it is not of this model or prompt.
    """
    layout = bench.namespace.layout
    found = read_prompt_cache(file, layout)
    tokens = rendered(bench.model.tokenizer, prompt).tokens
    if found.position is None and prompt.messages is not None:
        tokens = _as_cached(bench.model.tokenizer, prompt.messages)
    if not tokens or not 0 <= min(tokens) <= max(tokens) < bench.model.vocabulary:
        raise BadPromptError("the prompt is empty, or has ids that the model lacks")
    held = len(tokens) if found.position is None else found.position
    if held > len(tokens):
        raise PromptCacheMismatchError(
            f"the file holds {held} tokens, the prompt has {len(tokens)}"
        )
    check_prompt(bench.model.module, bench.kv_form, layout, found.caches, tokens[:held])
    signer = bench.keyring.signing_key()
    store_caches(
        bench.cache,
        bench.namespace,
        found.caches,
        tokens[:held],
        Provenance(Lineage.DERIVED, _UNKNOWN, frozenset({signer.public.key_id})),
    )
    issue = Issue(
        signer=signer,
        issuer_name=platform.node() or "kvport",
        model_name=bench.model.name,
        tokenizer=bench.model.tokenizer_digest,
        now=datetime.now(UTC),
    )
    encoded = encode_tokens(tokens[:held])
    export = open_export(bench.cache, bench.ledger, bench.namespace, encoded, issue)
    to.writelines(export.stream())
    return Converted(export.artifact_id, bench.model.name, held)


def unwrap(bench: Workbench, file: BinaryIO, form: Form, to: BinaryIO) -> Converted:
    """Write an artifact as a prompt cache file, once all of it is verified.

    Raises:
        PromptCacheError: the form cannot hold this state.
        KvportError: whatever an import refuses.
    """
    artifact, path = bench.admit(file)
    position = path[-1].end
    caches = assemble(bench.cache, bench.namespace, path, position).caches()
    # What `mlx_lm.generate --prompt-cache-file` asks of a file.
    metadata = {"model": bench.source, "tokenizer_config": "{}"}
    write_prompt_cache(to, caches, form, metadata)
    return Converted(artifact, bench.model.name, position)


def _as_cached(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Messages as mlx-lm's `cache_prompt` renders them: the last one is left open."""
    found = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    return [int(token) for token in found]
