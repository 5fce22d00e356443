"""Why there is nothing to export: not allowed, never computed, gone, without point."""

from kvport.manifest.digests import Key
from kvport.manifest.tokens import TOKEN_SIZE, KeyChain
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.cache.records import Namespace, RemovalReason
from kvport.snapshot.errors import (
    EvictedError,
    NeverComputedError,
    NothingRestorableError,
    NotRestorableError,
    RevokedStateError,
    TierError,
)
from kvport.snapshot.transfer.ledger import Ledger


def why_nothing(
    cache: Cache, ledger: Ledger, namespace: Namespace, tokens: bytes
) -> NothingRestorableError | TierError:
    """The error that says why no prefix of these tokens can be exported.

    A tier first: while it holds, to send the prompt again is no help.

    Raises:
        StorageError: the ledger or the index could not be read.
    """
    match cache.settings(namespace.id).tier:
        case Tier.OFF:
            return TierError("its tier is off: what is stored is not restored")
        case Tier.READ_ONLY:
            return TierError("no prefix is restorable, and as read-only gets none")
    stored = cache.longest(namespace, tokens)
    keys = _likely_keys(namespace, tokens, stored)
    reason = ledger.was_removed(namespace.id, keys)
    if reason == RemovalReason.REVOKED:
        return RevokedStateError("what was stored of it came from a revoked key")
    if reason is not None:
        return EvictedError(f"this prefix was stored here, and is gone: {reason}")
    if stored:
        return NotRestorableError(f"{stored} tokens are stored, without restore point")
    return NeverComputedError("no prefix of these tokens was ever stored here")


def _likely_keys(namespace: Namespace, tokens: bytes, stored: int) -> list[Key]:
    """Keys at which segments may have ended, beyond what is stored.

    Segments end at block ends and at points. Of the latter only those in the last two
    blocks are tried: the end of a prompt lies there.
    """
    length, block = len(tokens) // TOKEN_SIZE, namespace.block_size
    last = max(length // block - 1, 0) * block
    ends = (p for p in range(1, length + 1) if p % block == 0 or p > last)
    chain = KeyChain(namespace.identity.digest, block)
    return [chain.key(tokens, end) for end in ends if end > stored]
