"""Opening a root: claimed, its index opened, and swept.

In: a path, its limits, what is set about namespaces. Out: the parts that a `Cache` is
made of. They agree with what the disk holds; nothing has been evicted yet.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.clock import Clocks
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.namespaces import Judge
from kvport.snapshot.cache.policies import Policies, SettingsOf
from kvport.snapshot.cache.records import Removed
from kvport.snapshot.cache.room import Room, VolumeSpace, automatic_cap
from kvport.snapshot.cache.root import Claim, claim
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.cache.sweep import INDEX_NAME, open_index, sweep
from kvport.snapshot.cache.tally import Tally


@attrs.frozen(kw_only=True)
class Parts:
    """What stands on one open root.

    Attributes:
        swept_bytes: allocated bytes of files that the sweep found to be nobody's.
    """

    root: Claim
    files: Files
    index: Index
    account: Account
    evictor: Evictor
    counters: Counters
    tally: Tally
    policies: Policies
    room: Room
    swept_bytes: int


def open_root(
    root: Path,
    *,
    cap_bytes: int | None,
    on_removed: Callable[[Sequence[Removed]], None],
    expected_root: str | None,
    mac_key: bytes | None,
    clocks: Clocks,
    counters: Counters,
    free_floor: int | None,
    settings: SettingsOf,
    judge: Judge,
) -> Parts:
    """Own a root and sweep it; see `Cache.open`."""
    owned = claim(root, expected_root)
    with contextlib.ExitStack() as undo:
        undo.callback(owned.release)
        files = Files(root, owned.check)
        mac = RowMac(mac_key, owned.root_id)
        for directory in (files.namespaces, files.staging):
            files.make_directory(directory)
        ballast = Ballast(root)
        connection = open_index(
            files,
            owned.root_id,
            ballast,
            counters,
            fresh=owned.fresh,
            mac=mac,
        )
        undo.callback(connection.close)
        if cap_bytes is None:
            account = Account(automatic_cap(VolumeSpace.of(root), 0))
        else:
            account = Account(cap_bytes)
        index = Index(connection, root / INDEX_NAME, account, mac, clocks.wall)
        tally = Tally(index)
        policies = Policies(index, account, tally, judge)
        for known in policies.namespaces.all():
            policies.put(known.id, settings(known))
        room = Room(files, account, cap_bytes, free_floor)
        evictor = Evictor(
            index,
            files,
            account,
            ballast,
            clocks=clocks,
            policies=policies,
            room=room,
            counters=counters,
            on_removed=on_removed,
        )
        swept = sweep(index, files, account, evictor)
        undo.pop_all()
    return Parts(
        root=owned,
        files=files,
        index=index,
        account=account,
        evictor=evictor,
        counters=counters,
        tally=tally,
        policies=policies,
        room=room,
        swept_bytes=swept,
    )
