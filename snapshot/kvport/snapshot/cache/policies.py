"""What was set about namespaces, and how each of them stands by it.

In: settings by namespace id, for namespaces that exist or not yet; a judge of what can
be used. Out: settings in force, and standings: what a namespace holds, may hold, and
cannot lose to others. They live as long as the process; who starts it knows where they
are kept.

Shares: a quota protects what is below it. If all quotas together are more than blobs
may take, each protects its part of that.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import structlog

from kvport.manifest.layout import StateLayout
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.namespaces import (
    Judge,
    KnownNamespace,
    NamesOf,
    Namespaces,
    name_at_load,
)
from kvport.snapshot.cache.policy import DEFAULT, NamespaceSettings, Tier
from kvport.snapshot.cache.tally import Tally

SettingsOf = Callable[[KnownNamespace], NamespaceSettings]

_log = structlog.get_logger(__name__)


@attrs.frozen
class Standing:
    """Of one namespace, in allocated bytes of its files.

    Attributes:
        layout: of its states; None if this version cannot read it.
        used: what it holds.
        quota: what it may hold; None for no limit.
        share: what no other namespace's state takes from it.
        incompatible: why its state cannot be used; None if it can.
    """

    layout: StateLayout | None
    used: int
    quota: int | None
    share: int
    incompatible: str | None

    @property
    def over_quota(self) -> int:
        """Bytes that it holds above its quota."""
        return 0 if self.quota is None else max(0, self.used - self.quota)


class Policies:
    """Thread-safe; a change is seen by the next look."""

    def __init__(
        self,
        index: Index,
        account: Account,
        tally: Tally,
        judge: Judge,
        names: NamesOf = name_at_load,
    ) -> None:
        self.namespaces: Final = Namespaces(index, names)
        self._tally: Final = tally
        self._account: Final = account
        self._judge = judge
        self._lock: Final = threading.Lock()
        self._settings: Mapping[str, NamespaceSettings] = {}
        self._incompatible: Mapping[str, str] = {}

    # What is set.

    def __getitem__(self, namespace_id: str) -> NamespaceSettings:
        return self._settings.get(namespace_id, DEFAULT)

    def put(self, namespace_id: str, settings: NamespaceSettings) -> None:
        """Set what is in force from now on."""
        with self._lock:
            self._settings = {**self._settings, namespace_id: settings}

    def restores(self, namespace_id: str) -> bool:
        """Whether stored state may be restored."""
        return self[namespace_id].tier is not Tier.OFF

    def stores(self, namespace_id: str) -> bool:
        """Whether state may be added."""
        return self[namespace_id].tier is Tier.ON

    # How namespaces stand.

    def judge(self) -> None:
        """Find out again which namespaces can be used; say what is new."""
        known = self.namespaces.all()
        before, found = self._incompatible, dict(self._judge(known))
        for one in known:
            if one.id in found and found[one.id] != before.get(one.id):
                # Beside what is shown anyway, a command without a server keeps quiet.
                _log.info(
                    "cache_namespace_incompatible",
                    namespace=one.id,
                    model=one.model,
                    reason=found[one.id],
                    nbytes=self.used(one.n),
                )
        self._incompatible = found

    def incompatible(self, namespace_id: str) -> str | None:
        """Why a namespace's state cannot be used; None if it can."""
        return self._incompatible.get(namespace_id)

    def used(self, n: int) -> int:
        """Allocated bytes of a namespace's files."""
        return self._tally.allocated().get(n, 0)

    def standings(
        self, quotas: Mapping[str, int | None] | None = None, usable: int | None = None
    ) -> dict[int, Standing]:
        """All namespaces by row.

        Args:
            quotas: in place of those that are set, by id.
            usable: bytes that blobs may take together; as the account says if None.
        """
        usable = max(0, self._account.usable if usable is None else usable)
        known, used = self.namespaces.all(), self._tally.allocated()
        wanted = {
            one.id: (quotas or {}).get(one.id, self[one.id].quota_bytes)
            for one in known
        }
        incompatible = self._incompatible
        promised = sum(
            quota or 0 for name, quota in wanted.items() if name not in incompatible
        )
        return {
            one.n: Standing(
                layout=None if one.identity is None else one.identity.layout,
                used=used.get(one.n, 0),
                quota=wanted[one.id],
                share=0
                if one.id in incompatible
                else _share(wanted[one.id] or 0, promised, usable),
                incompatible=incompatible.get(one.id),
            )
            for one in known
        }


def _share(quota: int, promised: int, usable: int) -> int:
    return quota if promised <= usable else quota * usable // promised
