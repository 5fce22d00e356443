"""Opening a root: claimed, its index opened, and swept.

In: an `Opening`: a path, its limits, what is set about namespaces. Out: the parts that
a `Cache` is made of. They agree with what the disk holds; nothing has been evicted yet.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.barred import Barred
from kvport.snapshot.cache.clock import SYSTEM, Clocks
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.namespaces import Judge, NamesOf, name_at_load
from kvport.snapshot.cache.policies import Policies, SettingsOf
from kvport.snapshot.cache.policy import DEFAULT
from kvport.snapshot.cache.records import Removed
from kvport.snapshot.cache.room import Room, VolumeSpace, automatic_cap
from kvport.snapshot.cache.root import Claim, claim
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.cache.sweep import INDEX_NAME, open_index, sweep
from kvport.snapshot.cache.tally import Tally


@attrs.frozen(kw_only=True)
class Opening:
    """A root, and how it is opened.

    Attributes:
        root: made if it does not exist, its parent does and none is expected.
        cap_bytes: allocated bytes of everything below the root; None for half of what
            is free and ours.
        free_floor: bytes that the volume keeps free, also while others fill it; 0 for
            none, None for the larger of 10 GiB and 5 % of it.
        expected_root: id that the root must have; None takes any, or a new one.
        mac_key: 32 bytes of the home, that rows are held to; None for a public key.
        on_removed: told of every node that goes, after it went; it must not call the
            cache.
        on_failed: told when the volume refused a batch, and is not just full.
        settings: of namespaces that there are, from the start.
        names: of a namespace, as of `NamesOf`.
        judge: which namespaces cannot be used, and why.
        settle: whether state goes for the cap's sake, or because it has expired, now
            and while it is open; else by order only.
        clocks: by which leases, pins and state with a time to live end.
        counters: go on, also from what was written within the hour.
    """

    root: Path
    cap_bytes: int | None = None
    free_floor: int | None = None
    expected_root: str | None = None
    mac_key: bytes | None = None
    on_removed: Callable[[Sequence[Removed]], None] = lambda _: None
    on_failed: Callable[[], None] = lambda: None
    settings: SettingsOf = lambda _: DEFAULT
    names: NamesOf = name_at_load
    judge: Judge = lambda _: {}
    settle: bool = True
    clocks: Clocks = SYSTEM
    counters: Counters = attrs.field()

    @counters.default
    def _begun(self) -> Counters:
        return Counters(self.clocks.boot)


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
    barred: Barred = attrs.field(factory=Barred)


def open_root(opening: Opening) -> Parts:
    """Own a root and sweep it; see `Cache.open`."""
    root, clocks, counters = opening.root, opening.clocks, opening.counters
    owned = claim(root, opening.expected_root)
    with contextlib.ExitStack() as undo:
        undo.callback(owned.release)
        files = Files(root, owned.check)
        mac = RowMac(opening.mac_key, owned.root_id)
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
        if opening.cap_bytes is None:
            account = Account(automatic_cap(VolumeSpace.of(root), 0))
        else:
            account = Account(opening.cap_bytes)
        index = Index(connection, root / INDEX_NAME, account, mac, clocks.wall)
        tally = Tally(index)
        policies = Policies(index, account, tally, opening.judge, opening.names)
        for known in policies.namespaces.all():
            policies.put(known.id, opening.settings(known))
        room = Room(files, account, opening.cap_bytes, opening.free_floor)
        evictor = Evictor(
            index,
            files,
            account,
            ballast,
            clocks=clocks,
            policies=policies,
            room=room,
            counters=counters,
            on_removed=opening.on_removed,
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
