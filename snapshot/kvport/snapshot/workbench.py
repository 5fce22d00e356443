"""A model beside an empty cache: to take artifacts apart without a running node.

In: a model, and the keys of a home. What is imported here is refused for whatever any
import refuses. The cache is of a directory that the caller throws away.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.equivalence import NONE, Equivalences
from kvport.manifest.limits import MIB
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.records import Namespace, NodeRecord
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model, load_model, locate
from kvport.snapshot.errors import GoneError, UnsupportedModelError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.residents import DEFAULT_SCOPE
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.transfer.importer import Import, LocalModel
from kvport.snapshot.transfer.ledger import Direction, Ledger


@attrs.frozen(kw_only=True)
class Workbench:
    """A model, the keys of a home, and an empty cache; `open` makes one."""

    model: Model
    source: str
    kv_form: KvForm | None
    keyring: Keyring
    cache: Cache
    ledger: Ledger
    namespace: Namespace

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

    def admit(
        self, file: BinaryIO, equivalences: Equivalences = NONE
    ) -> tuple[ArtifactId, Sequence[NodeRecord]]:
        """Import an artifact: its id, and its path.

        Args:
            file: positioned at its first byte.
            equivalences: other versions that are taken for those here.

        Raises:
            KvportError: whatever an import refuses.
        """
        incoming = Import(
            cache=self.cache,
            ledger=self.ledger,
            models=[
                LocalModel(
                    self.model.name,
                    self.model.tokenizer_digest,
                    self.namespace,
                    equivalences,
                )
            ],
            trust=self.keyring.load_trust,
            local=self.keyring.signing_key().public.key_id,
            recipient=self.keyring.recipient_key,
        )
        try:
            while piece := file.read(MIB):
                incoming.feed(piece)
            result = incoming.finish()
        finally:
            incoming.abort()
        record = self.ledger.find(
            result.artifact_id, Direction.ADMITTED, scope=DEFAULT_SCOPE
        )
        if record is None:
            raise GoneError("what was imported is not there")
        return result.artifact_id, self.cache.path(self.namespace, record.tip)
