"""A home's cache without a server: for commands that look at it or change it.

In: a home that no process owns. Out: `Orders` about its cache, as a server has them,
without an engine, and without mlx. Opening removes no state: nothing is evicted for a
cap, nor by itself while the cache is open. What no row speaks of is swept, as at every
open.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.cache.root import is_root
from kvport.snapshot.errors import MissingRootError, SettingError
from kvport.snapshot.home_lock import lock
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.namespaces import NamespaceBook
from kvport.snapshot.orders import JUDGE, Orders
from kvport.snapshot.remembered import Remembered
from kvport.snapshot.transfer.ledger import Ledger

ROOTS_NAME: Final = "cache-roots.json"
_NO_LIMIT: Final = 1 << 60
"""Bytes: the cap is a server's setting, and no reason to remove anything here."""


def root_of(home: Path, cache_root: Path | None) -> Path:
    """Where a home's cache is.

    Args:
        home: the home.
        cache_root: as the operator says; None for the only one that the home had.

    Raises:
        MissingRootError: it had none.
        SettingError: it had several.
    """
    known = Remembered(home / ROOTS_NAME).names()
    if cache_root is not None:
        root = cache_root.absolute()
        if str(root) not in known and not is_root(root):
            raise MissingRootError("no cache is there")
        return root
    if not known:
        raise MissingRootError("the home has not had a cache yet")
    if len(known) > 1:
        raise SettingError(
            f"the home has had several caches: {', '.join(known)}; name one with"
            " --cache-dir"
        )
    return Path(known[0])


@contextlib.contextmanager
def opened(home: Path, root: Path, *, starting: bool = False) -> Iterator[Orders]:
    """Own the home and its cache for the block.

    Args:
        home: which exists.
        root: from `root_of`.
        starting: see the cache under the cap of a start, which `plan` is about; else
            there is none.

    Raises:
        HomeInUseError: a server, or another command, runs on the home.
        KeyFileError: the cache's key is missing, or not fit for use.
        ConfigFileError: what is set about namespaces cannot be read.
        MissingRootError: the cache, or its volume, is not there.
        ForeignRootError: the directory is no cache of this format.
        CacheInUseError: another process owns it.
        StorageError: the volume refused.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock(home))
        book = NamespaceBook(home)
        ledger = Ledger(home / "state.sqlite")
        undo.callback(ledger.close)
        cache = Cache.open(
            root,
            cap_bytes=None if starting else _NO_LIMIT,
            free_floor=None if starting else 0,
            on_removed=ledger.record_removed,
            expected_root=Remembered(home / ROOTS_NAME).get(str(root)),
            mac_key=Keyring(home).cache_mac_key(),
            settings=lambda known: book.settings(known.id, known.model, known.scope),
            judge=JUDGE,
            settle=False,
        )
        undo.callback(cache.close)
        ledger.reconcile(cache)
        swept = Freed(cache.administration.swept_bytes)
        orders = Orders(
            cache=lambda: cache, book=book, ledger=ledger, reclaim=lambda: swept
        )
        undo.callback(orders.close)
        yield orders
