"""Keys whose state is not stored any more, since they were revoked.

In: key ids, of which none ever leaves again. Out: whether a statement names one. What
was on its way when a key was revoked is so kept from coming after the purge.
"""

from collections.abc import Collection

from kvport.manifest.identity import KeyId, Provenance


class Barred:
    """A set that only grows; may be asked from any thread."""

    def __init__(self) -> None:
        self._keys: frozenset[KeyId] = frozenset()

    def add(self, keys: Collection[KeyId]) -> None:
        """Bar these keys from now on; one thread at a time."""
        self._keys |= frozenset(keys)

    def names(self, said: Provenance) -> bool:
        """Whether a statement names a barred key."""
        return not self._keys.isdisjoint(said.origins)
