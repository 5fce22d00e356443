"""Artifacts that a node knows: kept exports, and what was admitted."""

from datetime import UTC, datetime
from typing import Any

from kvport.api.bodies import CacheOptions
from kvport.manifest.digests import ArtifactId
from kvport.manifest.nodes import NodeId
from kvport.manifest.timestamps import format_time
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
    export.keep(node.ledger, datetime.now(UTC))


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


def facts(node: Node, artifact: str) -> dict[str, Any]:
    """What is known of one artifact.

    Raises:
        ArtifactUnknownError: it was neither kept nor admitted here.
        ArtifactGoneError: its state was removed since.
    """
    record = _record(node, artifact)
    _path(node, record)
    return _facts(record, stored=True)


def all_facts(node: Node) -> list[dict[str, Any]]:
    """What is known of each artifact, newest first; `stored` if its state is there."""
    found = []
    for record in node.ledger.artifacts(DEFAULT_SCOPE):
        try:
            _path(node, record)
        except ArtifactGoneError:
            found.append(_facts(record, stored=False))
        else:
            found.append(_facts(record, stored=True))
    return found


def allowed_nodes(node: Node, options: CacheOptions) -> frozenset[NodeId] | None:
    """The nodes that a request may restore; None stands for all.

    Raises:
        ArtifactUnknownError: the artifact was neither kept nor admitted here.
        ArtifactGoneError: its state was removed since.
    """
    if options.artifact is None:
        return None
    return _path(node, _record(node, options.artifact))


def _record(node: Node, artifact: str) -> ArtifactRecord:
    for direction in (Direction.ADMITTED, Direction.EXPORTED):
        ident = ArtifactId(artifact)
        record = node.ledger.find(ident, direction, scope=DEFAULT_SCOPE)
        if record is not None:
            return record
    raise ArtifactUnknownError("no artifact of this id is known here")


def _path(node: Node, record: ArtifactRecord) -> frozenset[NodeId]:
    try:
        path = node.cache.path(node.ledger.namespace(record), record.tip)
    except GoneError as error:
        raise ArtifactGoneError("the artifact's state was removed") from error
    return frozenset(one.id for one in path)


def _facts(record: ArtifactRecord, *, stored: bool) -> dict[str, Any]:
    return {
        "artifact_id": record.id,
        "direction": record.direction,
        "model": record.model,
        "issuer": record.issuer,
        "created": format_time(record.created),
        "expires": format_time(record.expires),
        "recorded": format_time(record.recorded),
        "restorable_tokens": record.tokens,
        "size_bytes": record.size,
        "stored": stored,
    }
