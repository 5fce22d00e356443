"""What kvport says of an artifact: the code that refuses it, or what is found in it."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvport.manifest.errors import KvportError
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.trust import TrustList
from kvport.manifest.verified import BlobEntry, VerifiedManifest, VerifiedNode
from kvport.manifest.verify import open_artifact
from kvport.snapshot.transfer.container import Accepted, ContainerReader
from tests.vectors.case import Case


def judge(case: Case) -> dict[str, Any]:
    """The vector's `expect.json` as kvport would have it, without `breaks`."""
    try:
        return examine(case)
    except KvportError as error:
        return {"code": error.code, "fields": sorted(error.fields)}


def examine(case: Case, step: int = 1 << 16) -> dict[str, Any]:
    """What is found in the artifact, fed in chunks of `step` bytes.

    Raises:
        KvportError: it is refused.
    """
    acceptor = _Acceptor(case, TrustList.from_json(case.trust))
    reader = ContainerReader(acceptor)
    for at in range(0, len(case.container), step):
        reader.feed(memoryview(case.container)[at : at + step])
    reader.finish()
    return acceptor.found()


@attrs.define
class _Acceptor:
    """Takes what fits the case's model, or any model if it has none."""

    case: Case
    trust: TrustList
    outside: SealedArtifact | None = None
    verified: VerifiedManifest | None = None
    nodes: Sequence[VerifiedNode] = ()
    blobs: int = 0

    def accept(self, envelope: bytes) -> Accepted | SealedArtifact:
        opened = open_artifact(
            envelope, trust=self.trust, now=self.case.now, own_key=self.case.own_key
        )
        if isinstance(opened, SealedArtifact):
            self.outside = opened
            return opened
        self.verified = opened.fit(self.case.local)
        return self.verified, self

    def open(self, sealed: SealedArtifact, private: bytes) -> Accepted | None:
        if self.case.recipient is None:
            return None
        opened = sealed.open(private, self.case.recipient)
        self.verified = opened.fit(self.case.local)
        return self.verified, self

    def begin(self, nodes: Sequence[VerifiedNode], tokens: bytes) -> None:
        assert len(tokens) == 4 * nodes[-1].end
        self.nodes = nodes

    def begin_blob(self, entry: BlobEntry) -> None:
        pass

    def add(self, data: memoryview) -> None:
        pass

    def end_blob(self) -> None:
        self.blobs += 1

    def found(self) -> dict[str, Any]:
        if self.verified is None:
            assert self.outside is not None
            sealed = self.outside.sealed
            return {
                "artifact_id": self.outside.artifact_id,
                "artifact_kind": "sealed",
                "messages": 2 + len(sealed.blobs),
                "recipients": [wrap.recipient for wrap in sealed.recipients],
            }
        manifest = self.verified.manifest
        return {
            "artifact_id": self.verified.artifact_id,
            "artifact_kind": "sealed" if self.outside else "prefix",
            "blobs": self.blobs,
            "identity": manifest.identity.digest.hex(),
            "key": manifest.prefix.key.hex(),
            "node": self.nodes[-1].id.hex(),
            "points": [point.position for point in manifest.points],
            "tokens": manifest.prefix.tokens,
        }
