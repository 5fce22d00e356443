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

from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.files import storage_io
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.home_lock import lock
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.known_roots import KnownRoots, Limits
from kvport.snapshot.namespaces import NamespaceBook
from kvport.snapshot.orders import JUDGE, Orders
from kvport.snapshot.revoking import Revoking
from kvport.snapshot.transfer.ledger import Ledger
from kvport.snapshot.volume_status import check_writable

_NO_LIMIT: Final = 1 << 60
"""Bytes: the cap is a server's setting, and no reason to remove anything here."""


@contextlib.contextmanager
def opened(home: Path, root: Path, *, starting: bool = False) -> Iterator[Orders]:
    """Own the home and its cache for the block.

    Args:
        home: which exists.
        root: from `KnownRoots.to_open`.
        starting: see the cache under the limits of a start, as a server's last start
            set them, which `plan` and `stats` are about; else there are none.

    Raises:
        HomeInUseError: a server, or another command, runs on the home.
        KeyFileError: the cache's key is missing, or not fit for use.
        ConfigFileError: what is set about namespaces cannot be read.
        MissingRootError: the cache, or its volume, is not there.
        ForeignRootError: the directory is no cache of this format.
        CacheInUseError: another process owns it.
        ReadOnlyError: nothing can be written on its volume.
        StorageError: the volume refused.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock(home))
        book, keyring = NamespaceBook(home), Keyring(home)
        ledger = Ledger(home / "state.sqlite")
        undo.callback(ledger.close)
        roots = KnownRoots(home)
        limits = roots.limits(root) if starting else Limits(_NO_LIMIT, 0)
        if root.is_dir():
            with storage_io():
                check_writable(root)
        opening = Opening(
            root=root,
            cap_bytes=limits.cap,
            free_floor=limits.floor,
            on_removed=ledger.record_removed,
            expected_root=roots.id_of(root),
            mac_key=keyring.cache_mac_key(),
            settings=lambda known: book.settings(known.id, known.model, known.scope),
            names=book.names,
            judge=JUDGE,
            settle=False,
        )
        cache = Cache.open(opening)
        undo.callback(cache.close)
        ledger.reconcile(cache)
        swept = Freed(cache.administration.swept_bytes)
        orders = Orders(
            cache=lambda: cache,
            book=book,
            ledger=ledger,
            revoking=Revoking(
                trust=keyring.load_trust, cache=lambda: cache, ledger=ledger
            ),
            reclaim=lambda: swept,
        )
        undo.callback(orders.close)
        yield orders
