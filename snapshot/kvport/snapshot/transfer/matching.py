"""Which of the models here an artifact is for.

An artifact names its model by state identity, never by name. The model with the same
one is taken; without one, the refusal names the fields of the closest, so that it says
what to change.
"""

from collections.abc import Sequence

import attrs

from kvport.manifest.digests import parse_digest
from kvport.manifest.equivalence import NONE, Equivalences
from kvport.manifest.signed import Local, SignedManifest
from kvport.manifest.verified import VerifiedManifest
from kvport.snapshot.cache.records import Namespace


@attrs.frozen
class LocalModel:
    """A model that artifacts may be imported for.

    Attributes:
        name: under which it is served.
        tokenizer_digest: of its tokenizer's files, `blake3:<64 hex>`.
        namespace: where its state lives, in the importing caller's scope.
        equivalences: other versions whose state is taken for the model's.
    """

    name: str
    tokenizer_digest: str
    namespace: Namespace
    equivalences: Equivalences = NONE

    @property
    def requirement(self) -> Local:
        """What an artifact must fit."""
        return Local(
            identity=self.namespace.identity,
            tokenizer=parse_digest(self.tokenizer_digest),
            block_size=self.namespace.block_size,
            model=self.name,
            equivalences=self.equivalences,
        )


def fit(
    models: Sequence[LocalModel], signed: SignedManifest
) -> tuple[VerifiedManifest, LocalModel]:
    """Hold a manifest to the model that it is for, or is closest to.

    Args:
        models: at least one.
        signed: the manifest.

    Raises:
        KvportError: a subclass, as of `SignedManifest.fit`.
    """
    model = min(
        models,
        key=lambda each: len(each.requirement.mismatched_fields(signed.manifest)),
    )
    return signed.fit(model.requirement), model
