"""What the ledger keeps of one artifact: facts, and the bytes that were signed."""

from datetime import datetime
from enum import StrEnum

import attrs

from kvport.manifest.canonical import strict_loads
from kvport.manifest.digests import ArtifactId
from kvport.manifest.envelope import open_envelope
from kvport.manifest.identity import KeyId, StateIdentity
from kvport.manifest.model import Manifest
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.records import Namespace


class Direction(StrEnum):
    """Which way an artifact went."""

    EXPORTED = "exported"
    ADMITTED = "admitted"


@attrs.frozen(kw_only=True)
class ArtifactRecord:
    """One artifact that went out or came in.

    Attributes:
        id: digest of its payload.
        direction: which way it went.
        namespace: id of the namespace that its state is in.
        scope: that namespace's scope.
        model: name under which the model was served.
        issuer: key that issued it.
        origins: keys that any part of the state came from, as signed.
        created: as signed.
        expires: as signed; admitted state does not expire with it.
        tokens: length of the prefix.
        size: bytes of the container.
        tip: last node of its path.
        recorded: when it went, by this machine's clock.
        encoder: version of what compressed it, empty if it is not compressed or was not
            made here.
    """

    id: ArtifactId
    direction: Direction
    namespace: str
    scope: str
    model: str
    issuer: KeyId
    origins: frozenset[KeyId]
    created: datetime
    expires: datetime
    tokens: int
    size: int
    tip: NodeId
    recorded: datetime
    encoder: str = ""


@attrs.frozen
class Papers:
    """An artifact's signed bytes, verified before they were recorded.

    Attributes:
        envelope: as it was sent or received.
        inside: of a sealed artifact: its manifest's canonical JSON.
        content_key: of a sealed artifact that is kept: what it is opened with.
        identity: canonical JSON of the state identity that it was admitted as, if that
            is not the manifest's.
    """

    envelope: bytes = attrs.field(repr=False)
    inside: bytes = attrs.field(default=b"", repr=False)
    content_key: bytes = attrs.field(default=b"", repr=False)
    identity: bytes = attrs.field(default=b"", repr=False)

    def manifest(self) -> Manifest:
        """The manifest, also of what is sealed."""
        payload = self.inside or open_envelope(self.envelope).payload
        return Manifest.from_json(strict_loads(payload))

    def namespace(self, scope: str) -> Namespace:
        """Where its state is."""
        manifest = self.manifest()
        identity = manifest.identity
        if self.identity:
            identity = StateIdentity.from_json(strict_loads(self.identity))
        return Namespace.of(identity, scope, manifest.block_size)
