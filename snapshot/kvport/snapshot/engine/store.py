"""Where a model's state is kept, and how a request comes by what is there."""

import contextlib
from collections.abc import Callable

import attrs

from kvport.manifest.identity import KeyId, Numerics
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.requests import Request
from kvport.snapshot.engine.restore import NOTHING, Prepared, Restorer
from kvport.snapshot.engine.tails import Tail
from kvport.snapshot.errors import CacheAbsentError
from kvport.snapshot.volume import Volume


def _nothing() -> None:
    """Of a place for which nothing was arranged."""


@attrs.frozen(kw_only=True)
class Store:
    """A model's place in a cache that may come and go; without state there is none.

    Attributes:
        volume: of the cache.
        namespace: the place.
        local: this node's key.
        release: to be called when the model has gone; ends what was arranged for it.
    """

    volume: Volume
    namespace: Namespace
    local: KeyId
    release: Callable[[], None] = _nothing

    @property
    def tier(self) -> Tier | None:
        """What the cache does for the model now; None while there is none."""
        try:
            return self.volume.cache.settings(self.namespace.id).tier
        except CacheAbsentError:
            return None

    @property
    def writable(self) -> bool:
        """Whether state may be added now."""
        return self.tier is Tier.ON

    def prepare(
        self,
        request: Request,
        owner: str,
        *,
        numerics: Numerics,
        retention: Retention,
        tail: Tail | None,
    ) -> Prepared:
        """Find and read what a request restores, where that is allowed.

        Called in a worker thread.

        Args:
            request: what is asked.
            owner: of the leases that are taken.
            numerics: this machine's.
            retention: the model's, of a conversation's points; the namespace's goes
                before it.
            tail: the end of a reply in memory that the prompt begins with.
        """
        try:
            cache = self.volume.cache
        except CacheAbsentError:
            return NOTHING
        settings = cache.settings(self.namespace.id)
        if settings.tier is not Tier.ON:
            if request.write:
                cache.note_unstored(self.namespace)
            read = request.read and settings.tier is Tier.READ_ONLY
            request = attrs.evolve(request, read=read, write=False)
        restorer = Restorer(
            cache=cache,
            suspect=self.volume.suspect,
            namespace=self.namespace,
            request=request,
            owner=owner,
            local=self.local,
            numerics=numerics,
            retention=settings.retention or retention,
            tail=tail,
        )
        return restorer.prepare()

    def note_restored(self, tokens: int) -> None:
        """Count tokens that a request has restored."""
        with contextlib.suppress(CacheAbsentError):
            self.volume.cache.note_restored(self.namespace, tokens)

    def flush(self) -> None:
        """Wait until all that was handed to the cache is stored, or was skipped."""
        with contextlib.suppress(CacheAbsentError):
            self.volume.cache.flush()
