"""Reserved bytes are never below what the disk holds, and never above the cap."""

import os
import random

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.files import Files
from tests.cache.builder import (
    ALL,
    check_account,
    find,
    open_cache,
    read_or_lose,
    space,
    store,
    walk,
)

CAP = 6 * MIB


def test_reserved_covers_the_disk_at_every_flush_and_every_entry(root, monkeypatch):
    """Look at each fsync, and before each measurement corrects a reservation."""
    looks = []

    def look(account):
        numbers = account.numbers
        looks.append((walk(root), numbers.reserved))
        assert walk(root) <= numbers.reserved <= numbers.cap

    with open_cache(root, CAP) as cache:
        account = cache._account
        ns = space(cache, ALL)
        with monkeypatch.context() as patch:
            for owner, name in (
                (Account, "measured"),
                (Account, "change"),
                (Files, "write"),
                (os, "fsync"),
                (os, "rename"),
            ):
                real = getattr(owner, name)

                def looking(*args, _real=real, **kwargs):
                    look(account)
                    return _real(*args, **kwargs)

                patch.setattr(owner, name, looking)
            rng = random.Random(3)
            for number in range(25):
                tokens = [rng.randrange(20), *range(600)]
                size = rng.choice([10, 5000, 90_000, 300_000])
                ends = sorted(rng.sample(range(1, 600), 4))
                store(cache, ns, tokens, ends, size=size, variant=number)
                match = find(cache, ns, tokens)
                if rng.random() < 0.2:
                    cache.report_damage(ns, match.nodes[-1].blobs[0])
                elif rng.random() < 0.5:
                    assert read_or_lose(cache, ns, match.nodes)
        assert cache.stats().total.removed["evicted"] > 20
        assert len(looks) > 500
        check_account(cache, root)
        # The log is emptied within the account too.
        cache._index.checkpoint()
        check_account(cache, root)


def test_a_long_life_does_not_let_the_index_grow_for_ever(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        sizes = []
        for number in range(60):
            ends = range(1, 15)
            store(cache, ns, [number, *range(50)], list(ends), size=50)
            if number % 20 == 19:
                sizes.append(cache.stats().account.index)
        assert cache.stats().account.reserved <= CAP
        check_account(cache, root)
    assert sizes[-1] < CAP // 2
