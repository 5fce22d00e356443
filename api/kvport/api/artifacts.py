"""What is said over HTTP of an artifact that a node knows."""

from typing import Any

from kvport.manifest.timestamps import format_time
from kvport.snapshot.transfer.ledger import ArtifactRecord


def facts(record: ArtifactRecord, *, stored: bool) -> dict[str, Any]:
    """One artifact's facts; `stored` says whether its state is there."""
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
