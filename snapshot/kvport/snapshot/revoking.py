"""Revoking: what came from a revoked key goes, wherever the node has it.

In: the trust list, read anew. Out: what went. Index and disk first, which bars what is
on its way there; then memory and running requests, which find no more of it; then the
ledger's records, and with them what could be exported again. To do it twice is to do it
once, so a start does it too: whoever revoked may not have come further than the list.
"""

import threading
from collections.abc import Callable, Collection
from typing import Final

import attrs
import structlog

from kvport.manifest.identity import KeyId
from kvport.manifest.trust import TrustList
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.purge import Purged
from kvport.snapshot.errors import CacheAbsentError
from kvport.snapshot.transfer.ledger import Ledger

_log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class PurgeOutcome:
    """What a purge did.

    Attributes:
        keys: how many are revoked.
        cache: what went there; None if there is no cache at present, which is purged
            before it is used again.
        requests: running ones that were ended.
        artifacts: records that were forgotten.
    """

    keys: int
    cache: Purged | None
    requests: int
    artifacts: int


def _nothing(keys: Collection[KeyId]) -> int:  # noqa: ARG001 - a default
    return 0


class Revoking:
    """Of one home; thread-safe."""

    def __init__(
        self,
        *,
        trust: Callable[[], TrustList],
        cache: Callable[[], Cache],
        ledger: Ledger,
        requests: Callable[[Collection[KeyId]], int] = _nothing,
    ) -> None:
        """Purges of a home.

        Args:
            trust: reads the trust list.
            cache: the open cache, or an error that says why there is none.
            ledger: the home's artifacts.
            requests: ends what goes on top of state from such keys, and answers how
                many requests there were.
        """
        self._trust: Final = trust
        self._cache: Final = cache
        self._ledger: Final = ledger
        self._requests: Final = requests
        self._purging: Final = threading.Lock()

    def purge(self) -> PurgeOutcome:
        """Do away with all that the trust list revokes, as it is now.

        Once this returns nothing of it is found, restored, exported or stored again.

        Raises:
            KeyFileError: the trust list cannot be read; nothing was done.
            EngineStoppedError: the node is closing.
            DiskFullError: the cache's index has no room for it; some may be done.
            StorageError: the volume, or the ledger, refused; likewise.
        """
        with self._purging:
            keys = self._trust().revoked_keys
            purged: Purged | None = None
            try:
                purged = self._cache().administration.purge(keys)
            except CacheAbsentError:
                _log.warning("purge_without_cache")
            finally:
                requests = self._requests(keys)
                artifacts = self._ledger.purge(keys)
        return PurgeOutcome(
            keys=len(keys), cache=purged, requests=requests, artifacts=artifacts
        )
