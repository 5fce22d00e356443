"""What is asked of a removal, and what it names; plain data."""

import attrs

from kvport.snapshot.cache.records import RemovalReason


@attrs.frozen
class Demand:
    """What is wanted.

    Attributes:
        missing: allocated bytes that must go, in whatever step.
        always: reasons for which all goes that can, whether bytes are missing or not.
        by: rows of the namespaces for which room is made.
        only: row of the only namespace that may lose state; it is over its quota.
        thorough: whether all leaves are looked at in step 3, or the oldest.
    """

    missing: int = 0
    always: frozenset[RemovalReason] = frozenset()
    by: frozenset[int] = frozenset()
    only: int | None = None
    thorough: bool = False


@attrs.frozen
class Victim:
    """A node to remove; what hangs on it came before.

    Attributes:
        n: its row.
        ns: its namespace's row.
        reason: why.
        at: when it was used last, in seconds of the epoch.
        nbytes: allocated bytes of the files that lose their last node.
    """

    n: int
    ns: int
    reason: RemovalReason
    at: int
    nbytes: int
