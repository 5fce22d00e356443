"""What an operator can set about a namespace; plain data, checked when it is made."""

from enum import StrEnum
from typing import Final

import attrs
from attrs.validators import ge, optional

from kvport.snapshot.cache.retention import Retention


class Tier(StrEnum):
    """What the cache does for a namespace."""

    ON = "on"
    READ_ONLY = "read-only"
    """What is stored is restored; nothing is added."""
    OFF = "off"
    """Nothing is restored or added; what is stored stays."""


@attrs.frozen(kw_only=True)
class NamespaceSettings:
    """Of one namespace.

    Attributes:
        quota_bytes: allocated bytes that it may hold at most; what it holds up to this
            (or its share of the cap, if all quotas together are more than that) no
            other namespace can evict. None: no limit but the cap, and no protection.
        ttl: seconds after the last use until its state expires; None for never. State
            that expired by a shorter one can be read again until it is removed.
        tier: what the cache does for it.
        retention: what is kept of a conversation's points; None for the model's.
        reclaim_on_unload: whether its state goes when its model is unloaded.
        write_bytes_per_hour: bytes that may be written to the disk for it within any
            hour; None for no limit.

    Raises:
        ValueError: a number below 1.
    """

    quota_bytes: int | None = attrs.field(default=None, validator=optional(ge(1)))
    ttl: int | None = attrs.field(default=None, validator=optional(ge(1)))
    tier: Tier = Tier.ON
    retention: Retention | None = None
    reclaim_on_unload: bool = False
    write_bytes_per_hour: int | None = attrs.field(
        default=None, validator=optional(ge(1))
    )


DEFAULT: Final = NamespaceSettings()
"""Of namespaces that nobody has set anything about."""
