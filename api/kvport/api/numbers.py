"""A cache's numbers as one JSON object: for the command line and for Prometheus.

In: one reading. Out: what `GET /api/cache/stats` answers, and what `/metrics` is made
of, but for the models' requests. docs/operations.md says what each number means.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import attrs

from kvport.manifest.timestamps import format_time
from kvport.snapshot.cache.numbers import CacheStats, NamespaceStats
from kvport.snapshot.cache.stats import Counted
from kvport.snapshot.volume_status import VolumeStatus

Names = Callable[[str, str], Sequence[str]]

_NUMBERS: Final = (
    "since",
    "total_bytes",
    "cap_bytes",
    "effective_cap_bytes",
    "used_percent",
    "cache",
)


def cache_numbers(
    stats: CacheStats | None, loaded: Collection[str], names: Names
) -> dict[str, Any]:
    """The cache's part of them.

    Args:
        stats: a reading; None while there is no cache.
        loaded: ids of the namespaces of models that are loaded.
        names: of a namespace, as of `Orders.names`.
    """
    if stats is None:
        return dict.fromkeys(_NUMBERS)
    return {
        "since": _time(stats.since),
        "total_bytes": stats.total_bytes,
        "cap_bytes": stats.account.cap,
        "effective_cap_bytes": stats.account.effective,
        "used_percent": round(stats.account.used_percent, 2),
        "cache": _cache(stats, loaded, names),
    }


def volume_numbers(status: VolumeStatus) -> dict[str, Any]:
    """How it is with the cache's volume."""
    return {**attrs.asdict(status), "since": format_time(status.since)}


def _cache(stats: CacheStats, loaded: Collection[str], names: Names) -> dict[str, Any]:
    return {
        "account": attrs.asdict(stats.account),
        "beside": dict(stats.beside),
        "namespaces": [
            _namespace(one, names(one.id, one.model), is_loaded=one.id in loaded)
            for one in stats.namespaces
        ],
        "gone": _counted(stats.gone),
        "total": _counted(stats.total),
        "leases": stats.leases,
        "index_resets": stats.index_resets,
    }


def _namespace(
    one: NamespaceStats, names: Sequence[str], *, is_loaded: bool
) -> dict[str, Any]:
    return {
        "id": one.id,
        "scope": one.scope,
        "model": ", ".join(names),
        "source": one.source or None,
        "loaded": is_loaded,
        "last_loaded": _time(one.loaded or None),
        "block_size": one.block_size,
        "segments": one.nodes,
        "tokens": one.tokens,
        "files": one.files,
        "bytes": one.nbytes,
        "kinds": {
            kind.value: {"files": held.files, "bytes": held.nbytes}
            for kind, held in sorted(one.kinds.items())
        },
        **_counted(one.counted),
    }


def _counted(counted: Counted) -> dict[str, Any]:
    return {
        "hits": counted.hits,
        "misses": counted.misses,
        "restored_tokens": counted.restored_tokens,
        "captured_tokens": counted.captured_tokens,
        "written": dict(counted.written),
        "written_bytes": counted.written_bytes,
        "written_per_restored_token": counted.written_per_restored_token,
        "written_per_captured_token": counted.written_per_captured_token,
        "skipped": dict(counted.skipped),
        "removed": dict(counted.removed),
        "pruned": {
            kind.value: {"blobs": pruned.blobs, "bytes": pruned.nbytes}
            for kind, pruned in counted.pruned.items()
        },
        "cleared": {
            kind.value: {"blobs": cleared.blobs, "bytes": cleared.nbytes}
            for kind, cleared in counted.cleared.items()
        },
        "failed_prunings": counted.failed_prunings,
        "damaged": counted.damaged,
        "last_use": _time(counted.last_use),
    }


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return format_time(datetime.fromtimestamp(seconds, UTC))
