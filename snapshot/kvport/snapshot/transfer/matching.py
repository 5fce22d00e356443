"""Which of the models here an artifact is for.

An artifact names its model by state identity, never by name. The model with the same
one is taken; without one, the refusal names the fields of the closest, so that it says
what to change.
"""

from collections.abc import Sequence
from datetime import datetime

import attrs

from kvport.manifest.digests import parse_digest
from kvport.manifest.identity import KeyId
from kvport.manifest.model import Manifest
from kvport.manifest.trust import TrustList
from kvport.manifest.verify import Local, VerifiedManifest, verify
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.errors import UnknownModelError


@attrs.frozen
class LocalModel:
    """A model that artifacts may be imported for.

    Attributes:
        name: under which it is served.
        tokenizer_digest: of its tokenizer's files, `blake3:<64 hex>`.
        namespace: where its state lives, in the importing caller's scope.
    """

    name: str
    tokenizer_digest: str
    namespace: Namespace

    @property
    def requirement(self) -> Local:
        """What an artifact must fit."""
        return Local(
            identity=self.namespace.identity,
            tokenizer=parse_digest(self.tokenizer_digest),
            block_size=self.namespace.block_size,
            model=self.name,
        )


def verify_for(
    models: Sequence[LocalModel],
    envelope: bytes,
    *,
    trust: TrustList,
    now: datetime,
    own_key: KeyId,
) -> tuple[VerifiedManifest, LocalModel]:
    """Verify an envelope against the model that it is for, or is closest to.

    Raises:
        UnknownModelError: there is no model.
        KvportError: another subclass, as of `verify`.
    """
    if not models:
        raise UnknownModelError("no model with a cache is served here")
    model = models[0]
    if len(models) > 1:
        # Signatures hold before the manifest is looked into; the fit is checked below.
        unfitted = verify(envelope, trust=trust, now=now, local=None, own_key=own_key)
        model = min(models, key=lambda each: _differences(unfitted.manifest, each))
    verified = verify(
        envelope, trust=trust, now=now, local=model.requirement, own_key=own_key
    )
    return verified, model


def _differences(manifest: Manifest, model: LocalModel) -> int:
    here = model.requirement
    return (
        len(manifest.identity.mismatched_fields(here.identity))
        + (manifest.tokenizer != here.tokenizer)
        + (manifest.block_size != here.block_size)
    )
