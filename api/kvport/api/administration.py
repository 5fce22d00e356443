"""An operator's orders as JSON: one answer for HTTP, and for commands without a server.

In: bodies. Out: objects of JSON types, times in RFC 3339, sizes in allocated bytes.
"""

from datetime import UTC, datetime
from typing import ClassVar, Final

import attrs

from kvport.api.admin_bodies import (
    ClearBody,
    NamespaceBody,
    PlanBody,
    ReleaseBody,
    ScrubBody,
)
from kvport.api.admin_client import Answer
from kvport.api.artifacts import facts
from kvport.api.numbers import cache_numbers, volume_numbers
from kvport.manifest.digests import ArtifactId
from kvport.manifest.timestamps import format_time
from kvport.snapshot.cache.administration import NamespaceInfo
from kvport.snapshot.cache.clear import KeptReason
from kvport.snapshot.cache.plan import Freed, PlanRow
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.room import Full
from kvport.snapshot.cache.scrub import ScrubProgress
from kvport.snapshot.orders import ClearOrder, Orders
from kvport.snapshot.volume_status import VolumeState, VolumeStatus


class Here:
    """`Administered` by this process; every call may block."""

    is_here: ClassVar[bool] = True

    def __init__(self, orders: Orders) -> None:
        """Answers of these orders."""
        self._orders: Final = orders

    def stats(self) -> Answer:
        """See `Administered`; without models, as none is loaded."""
        return {
            **cache_numbers(self._orders.stats(), (), self._orders.names),
            "volume": volume_numbers(_status(self._orders.full)),
            "models": {},
        }

    def namespaces(self) -> Answer:
        """See `Administered`."""
        found = self._orders.namespaces()
        return {"namespaces": [self._namespace(one) for one in found]}

    def set_namespace(self, body: NamespaceBody) -> Answer:
        """See `Administered`."""
        one, freed = self._orders.set_namespace(body.namespace, body.change)
        warnings = self._warnings(one)
        return {**self._namespace(one), **_freed(freed), "warnings": warnings}

    def plan(self, body: PlanBody) -> Answer:
        """See `Administered`."""
        plan = self._orders.plan(
            cap=body.cap_bytes,
            floor=body.free_floor_bytes,
            quotas=body.quotas,
            gc=body.gc,
        )
        return {
            "rows": [self._row(row) for row in plan.rows],
            "segments": plan.nodes,
            "bytes": plan.nbytes,
            "missing_bytes": plan.missing,
            "in_use_bytes": plan.in_use,
            "over_quota_bytes": dict(plan.over_quota),
            "ended_pins": plan.ended_pins,
        }

    def gc(self) -> Answer:
        """See `Administered`."""
        return _freed(self._orders.gc())

    def clear(self, body: ClearBody) -> Answer:
        """See `Administered`."""
        artifact = None if body.artifact is None else ArtifactId(body.artifact)
        cleared = self._orders.clear(
            ClearOrder(
                namespace=body.namespace,
                kind=body.kind,
                older_than=body.older_than,
                artifact=artifact,
                force=body.force,
            )
        )
        return {
            "freed_bytes": cleared.freed_bytes,
            "removed_segments": cleared.removed_segments,
            "dropped_blobs": cleared.dropped_blobs,
            "kept": {
                reason.value: cleared.kept.get(reason, 0) for reason in KeptReason
            },
        }

    def artifacts(self) -> Answer:
        """See `Administered`."""
        found = self._orders.artifacts()
        return {"artifacts": [facts(one.record, stored=one.stored) for one in found]}

    def purge(self) -> Answer:
        """See `Administered`."""
        done = self._orders.purge()
        purged = done.cache
        return {
            "revoked_keys": done.keys,
            "cache": None if purged is None else attrs.asdict(purged),
            "ended_requests": done.requests,
            "forgotten_artifacts": done.artifacts,
        }

    def pins(self) -> Answer:
        """See `Administered`."""
        holds = self._orders.holds()
        return {
            "leases": [
                {
                    "owner": one.owner,
                    "namespace": one.namespace,
                    "node": one.node.hex(),
                    "tokens": one.tokens,
                    "reading": one.reading,
                    "seconds_left": round(one.seconds_left, 1),
                }
                for one in holds.leases
            ],
            "pins": [
                {
                    "owner": one.owner,
                    "namespace": one.namespace,
                    "node": one.node.hex(),
                    "tokens": one.tokens,
                    "until": _time(one.until),
                    "seconds_left": one.seconds_left,
                }
                for one in holds.pins
            ],
        }

    def release(self, body: ReleaseBody) -> Answer:
        """See `Administered`."""
        released, freed = self._orders.release(body.owner, body.node)
        return {"released": released, **_freed(freed)}

    def scrub(self) -> Answer:
        """See `Administered`."""
        return _progress(self._orders.scrubbing.progress)

    def start_scrub(self, body: ScrubBody) -> Answer:
        """See `Administered`."""
        self._orders.scrubbing.start(body.bytes_per_second)
        return self.scrub()

    def stop_scrub(self) -> Answer:
        """See `Administered`."""
        self._orders.scrubbing.stop()
        return self.scrub()

    def _namespace(self, one: NamespaceInfo) -> Answer:
        names = self._orders.names(one.id, one.model)
        return {
            "id": one.id,
            "scope": one.scope,
            "model": ", ".join(names),
            "names": list(names),
            "source": one.source or None,
            "last_loaded": _time(one.loaded) if one.loaded else None,
            "block_size": one.block_size,
            "settings": _settings(one.settings),
            "origins": self._orders.origins(one),
            "bytes": sum(held.nbytes for held in one.usage.values()),
            "kinds": {
                kind.value: {"files": held.files, "bytes": held.nbytes}
                for kind, held in one.usage.items()
                if held.files
            },
            "share_bytes": one.share,
            "over_quota_bytes": one.over_quota,
            "incompatible": one.incompatible,
        }

    def _warnings(self, one: NamespaceInfo) -> list[str]:
        """What is set, and cannot be met now."""
        said = []
        quota, cap = one.settings.quota_bytes, self._orders.stats().account.effective
        if quota is not None and quota > cap:
            said.append(
                f"the quota is above what the cache may hold now, {cap} bytes: it"
                " limits nothing, and lessens the shares of all others"
            )
        if one.over_quota:
            said.append(
                f"{one.over_quota} bytes above the quota stay while they are leased or"
                " pinned; they go once that ends"
            )
        return said

    def _row(self, row: PlanRow) -> Answer:
        return {
            "namespace": row.namespace,
            "model": ", ".join(self._orders.names(row.namespace, row.model)),
            "reason": row.reason.value,
            "segments": row.nodes,
            "bytes": row.nbytes,
            "oldest": _time(row.oldest),
            "newest": _time(row.newest),
            "detail": row.detail,
        }


def _status(full: Full | None) -> VolumeStatus:
    """Of the volume of a cache that is open."""
    if full is None:
        return VolumeStatus(VolumeState.OK, "", datetime.now(UTC))
    return VolumeStatus(VolumeState.FULL, full.reason, full.since)


def _freed(freed: Freed) -> Answer:
    removed = {reason.value: count for reason, count in freed.nodes.items()}
    return {"freed_bytes": freed.nbytes, "removed": removed}


def _settings(settings: NamespaceSettings) -> Answer:
    """All of them; null where nothing is set."""
    retention = settings.retention
    return {
        "quota_bytes": settings.quota_bytes,
        "ttl": settings.ttl,
        "tier": settings.tier.value,
        "retention": None if retention is None else attrs.asdict(retention),
        "reclaim_on_unload": settings.reclaim_on_unload,
        "write_bytes_per_hour": settings.write_bytes_per_hour,
    }


def _progress(progress: ScrubProgress) -> Answer:
    completed = progress.completed
    return {
        "running": progress.running,
        "checked": progress.checked,
        "bytes": progress.nbytes,
        "damaged": progress.damaged,
        "remaining": progress.remaining,
        "completed": None if completed is None else _time(completed),
    }


def _time(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC))
