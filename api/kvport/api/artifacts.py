"""Artifacts that a node knows: kept exports, and what was admitted."""

from collections.abc import Iterable
from datetime import UTC, datetime

from kvport.manifest.digests import ArtifactId
from kvport.manifest.nodes import NodeId
from kvport.snapshot.errors import (
    ArtifactGoneError,
    ArtifactUnknownError,
    GoneError,
)
from kvport.snapshot.node import DEFAULT_SCOPE, Node
from kvport.snapshot.transfer.exporter import Export, reopen_export
from kvport.snapshot.transfer.ledger import ArtifactRecord, Direction


def keep(node: Node, export: Export) -> None:
    """Make it possible to ask for an export again, until it expires or is evicted."""
    node.ledger.keep_exported(export.record(datetime.now(UTC)))


def reopen(node: Node, artifact: str) -> Export:
    """A kept export, opened again.

    Raises:
        ArtifactUnknownError: it was not kept.
        ArtifactGoneError: its state was removed since.
        ExpiredError: nobody could import it any more.
    """
    return reopen_export(
        node.cache,
        node.ledger,
        ArtifactId(artifact),
        scope=DEFAULT_SCOPE,
        key=node.keyring.signing_key().public,
        now=datetime.now(UTC),
    )


def path_of(node: Node, artifact: str) -> frozenset[NodeId]:
    """The nodes of an artifact's path, exported here or admitted.

    Raises:
        ArtifactUnknownError: neither.
        ArtifactGoneError: the path was removed since.
    """
    for record in _records(node, artifact):
        try:
            path = node.cache.path(record.space, record.tip)
        except GoneError as error:
            raise ArtifactGoneError("the artifact's state was removed") from error
        return frozenset(one.id for one in path)
    raise ArtifactUnknownError("no artifact of this id is known here")


def is_stored(node: Node, record: ArtifactRecord) -> bool:
    """Whether the artifact's state is still there."""
    try:
        node.cache.path(record.space, record.tip)
    except GoneError:
        return False
    return True


def _records(node: Node, artifact: str) -> Iterable[ArtifactRecord]:
    for direction in (Direction.ADMITTED, Direction.EXPORTED):
        found = node.ledger.find(ArtifactId(artifact), direction, scope=DEFAULT_SCOPE)
        if found is not None:
            yield found
