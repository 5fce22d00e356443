"""Prompt cache files of mlx-lm to artifacts and back, without a running node.

A conversion goes through an empty cache of its own: what comes from a stranger's file
is stored and exported like any state, and an artifact is imported like any other,
refused for whatever an import refuses. Only the home's keys are used.
"""

import contextlib
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, Self

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.identity import Lineage, Numerics, Provenance
from kvport.manifest.limits import MIB
from kvport.manifest.tokens import BLOCK_SIZE, encode_tokens
from kvport.manifest.ustar import ENVELOPE_NAME
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.engine.convert import check_prompt, store_caches
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model, load_model, locate
from kvport.snapshot.engine.restore import assemble
from kvport.snapshot.engine.template import Message
from kvport.snapshot.errors import (
    BadPromptError,
    GoneError,
    PromptCacheMismatchError,
    UnsupportedModelError,
)
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.prompts import Prompt, rendered
from kvport.snapshot.residents import DEFAULT_SCOPE
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.prompt_cache import read_prompt_cache
from kvport.snapshot.state.prompt_cache_writer import Form, write_prompt_cache
from kvport.snapshot.state.untyped import Tokenizer
from kvport.snapshot.transfer.exporter import Issue, open_export
from kvport.snapshot.transfer.importer import Import, LocalModel
from kvport.snapshot.transfer.ledger import Direction, Ledger

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


@attrs.frozen(kw_only=True)
class Converter:
    """A model, the keys of a home, and an empty cache; `open` makes one."""

    model: Model
    source: str
    kv_form: KvForm | None
    _keyring: Keyring
    _cache: Cache
    _ledger: Ledger
    _namespace: Namespace

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        source: str,
        *,
        home: Path,
        work: Path,
        kv_form: KvForm | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> Iterator[Self]:
        """Load a model.

        Args:
            source: its directory or Hugging Face id.
            home: whose keys sign and are trusted.
            work: an empty directory, which needs as much room as the state.
            kv_form: of keys and values; None for the model's own.
            block_size: tokens in a block.

        Raises:
            KeyFileError: the home has no key.
            ModelLoadError: there is no such model.
            UnsupportedModelError: its state is not carried, or not in this form.
        """
        keyring = Keyring(home)
        keyring.signing_key()  # without it nothing need be loaded
        name, directory = locate(source)
        files = FileDigests(home / "model-digests.json")
        model = load_model(name, directory, files, kv_form)
        if model.identity is None:
            raise UnsupportedModelError(model.refusal or "the model runs uncached")
        with contextlib.ExitStack() as stack:
            ledger = Ledger(work / "state.sqlite")
            stack.callback(ledger.close)
            cache = stack.enter_context(
                Cache.open(Opening(root=work / "cache", free_floor=0))
            )
            yield cls(
                model=model,
                source=source,
                kv_form=kv_form,
                keyring=keyring,
                cache=cache,
                ledger=ledger,
                namespace=cache.namespace(model.identity, DEFAULT_SCOPE, block_size),
            )

    def wrap(self, file: BinaryIO, prompt: Prompt, to: BinaryIO) -> Converted:
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
        layout = self._namespace.layout
        found = read_prompt_cache(file, layout)
        tokens = rendered(self.model.tokenizer, prompt).tokens
        if found.position is None and prompt.messages is not None:
            tokens = _as_cached(self.model.tokenizer, prompt.messages)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.model.vocabulary:
            raise BadPromptError("the prompt is empty, or has ids that the model lacks")
        held = len(tokens) if found.position is None else found.position
        if held > len(tokens):
            raise PromptCacheMismatchError(
                f"the file holds {held} tokens, the prompt has {len(tokens)}"
            )
        check_prompt(
            self.model.module, self.kv_form, layout, found.caches, tokens[:held]
        )
        signer = self._keyring.signing_key()
        store_caches(
            self._cache,
            self._namespace,
            found.caches,
            tokens[:held],
            Provenance(Lineage.DERIVED, _UNKNOWN, frozenset({signer.public.key_id})),
        )
        issue = Issue(
            signer=signer,
            issuer_name=platform.node() or "kvport",
            model_name=self.model.name,
            tokenizer=self.model.tokenizer_digest,
            now=datetime.now(UTC),
        )
        encoded = encode_tokens(tokens[:held])
        export = open_export(self._cache, self._ledger, self._namespace, encoded, issue)
        to.writelines(export.stream())
        return Converted(export.artifact_id, self.model.name, held)

    def unwrap(self, file: BinaryIO, form: Form, to: BinaryIO) -> Converted:
        """Write an artifact as a prompt cache file, once all of it is verified.

        Raises:
            PromptCacheError: the form cannot hold this state.
            KvportError: whatever an import refuses.
        """
        local = self._keyring.signing_key().public.key_id
        incoming = Import(
            cache=self._cache,
            ledger=self._ledger,
            models=[
                LocalModel(
                    self.model.name, self.model.tokenizer_digest, self._namespace
                )
            ],
            trust=self._keyring.load_trust,
            local=local,
        )
        try:
            while piece := file.read(MIB):
                incoming.feed(piece)
            result = incoming.finish()
        finally:
            incoming.abort()
        record = self._ledger.find(
            result.artifact_id, Direction.ADMITTED, scope=DEFAULT_SCOPE
        )
        if record is None:
            raise GoneError("what was imported is not there")
        path = self._cache.path(self._namespace, record.tip)
        position = path[-1].end
        caches = assemble(self._cache, self._namespace, path, position).caches()
        # What `mlx_lm.generate --prompt-cache-file` asks of a file.
        metadata = {"model": self.source, "tokenizer_config": "{}"}
        write_prompt_cache(to, caches, form, metadata)
        return Converted(result.artifact_id, self.model.name, position)


def _as_cached(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Messages as mlx-lm's `cache_prompt` renders them: the last one is left open."""
    found = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    return [int(token) for token in found]
