"""Errors of a running node; the base and the rules are in `kvport.manifest.errors`."""

from kvport.manifest.errors import KvportError


class NothingRestorableError(KvportError):
    """An export found no restorable prefix; the subclasses say why."""


class NeverComputedError(NothingRestorableError):
    """No prefix of these tokens was ever stored here."""

    code = "never_computed"
    cause = "This server never computed or imported a prefix of this prompt."
    advice = "Send the prompt as a completion first, then export it."


class EvictedError(NothingRestorableError):
    """The prefix was stored, and has been evicted since."""

    code = "evicted"
    cause = "The prefix was stored here once and had to make room."
    advice = "Send the prompt again, or raise the cache's cap."


class CacheOffError(NothingRestorableError):
    """The model runs without the cache."""

    code = "cache_off"
    cause = "The model's cache is switched off, or could not be probed at load."
    advice = "See the reason in `kvport models list` or in the server's log."


class NotRestorableError(NothingRestorableError):
    """Rows are stored, but no restore point at or before the asked position."""

    code = "not_restorable"
    cause = "Rows of the prefix are stored, but no restore point within it."
    advice = "Send the prompt as a completion: its end becomes a restore point."


class CapacityError(KvportError):
    """The cache's cap does not leave room, even after eviction."""

    code = "capacity"
    cause = "The state is larger than what the cache may hold besides leased state."
    advice = "Raise the cache's cap, or wait until running requests end."


class DiskFullError(KvportError):
    """The volume is out of space."""

    code = "disk_full"
    cause = "The volume of the cache has no space left."
    advice = "Free space on the volume, or move the cache with --cache-dir."
