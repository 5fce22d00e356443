"""Leases, pins, expiry and removal by several owners at random, held to a simple model.

The model knows nodes, when each would expire by itself, who holds what until when, and
nothing of rows, files or locks. What may go is what the model says, nothing else.
"""

import math
import random

import attrs
import pytest

from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.snapshot.cache.leases import Lease
from kvport.snapshot.cache.records import Pin
from kvport.snapshot.errors import GoneError
from tests.cache.builder import (
    Time,
    check_account,
    evict_all,
    find,
    open_cache,
    position,
    read_all,
    remove_ended,
    space,
    store,
)

PROMPTS = [
    [*range(head, head + 200), *range(middle, middle + 200), *range(tail, tail + 200)]
    for head in (0, 10_000)
    for middle in (20_000, 30_000)
    for tail in (40_000, 50_000)
]
OWNERS = ("a", "b", "c")


@attrs.define
class Node:
    parent: NodeId
    prompt: list[int]
    ttl: float
    expires: float
    used: float


class World:
    """A cache and the model of it."""

    def __init__(self, root, seed):
        self.root = root
        self.random = random.Random(seed)
        self.time = Time()
        self.nodes: dict[NodeId, Node] = {}
        self.leases: list[tuple[Lease, NodeId, float]] = []
        self.pins: dict[tuple[NodeId, str], float] = {}
        self.open()

    def open(self):
        self.cache = open_cache(self.root, 16 * MIB, clocks=self.time.clocks)
        self.ns = space(self.cache)

    # The model.

    def upward(self, nodes):
        found = set()
        for node in nodes:
            n = node
            while n != ROOT_NODE and n not in found:
                found.add(n)
                n = self.nodes[n].parent
        return found

    def held(self):
        leased = [n for _, n, until in self.leases if until > self.time.boot]
        pinned = [n for (n, _), until in self.pins.items() if until > self.time.wall]
        return self.upward(n for n in [*leased, *pinned] if n in self.nodes)

    def current(self):
        now = self.time.wall
        fresh = [n for n, node in self.nodes.items() if node.expires > now]
        pinned = [n for (n, _), until in self.pins.items() if until > now]
        return self.upward([*fresh, *pinned])

    def lose(self, gone):
        """What is lost gives its life and last use to its parent."""
        for n in sorted(gone, key=lambda n: -len(self.nodes[n].prompt)):
            node = self.nodes.pop(n)
            if (parent := self.nodes.get(node.parent)) is not None:
                parent.expires = max(parent.expires, node.expires)
                parent.used = max(parent.used, node.used)
        self.pins = {key: t for key, t in self.pins.items() if key[0] in self.nodes}

    def use(self, n, ttl=None):
        node = self.nodes[n]
        if ttl is not None:
            node.ttl = max(node.ttl, ttl)
        node.used = self.time.wall
        node.expires = max(node.expires, self.time.wall + node.ttl)

    # What happens.

    def some_node(self):
        return self.random.choice([*self.nodes, None]) if self.nodes else None

    def do_store(self):
        prompt = self.random.choice(PROMPTS)
        cuts = [200, 400, 600][: self.random.randint(1, 3)]
        ttl = self.random.choice([None, 30, 300])
        pin = self.random.choice([None, None, Pin(self.random.choice(OWNERS), 50)])
        tip = store(self.cache, self.ns, prompt, cuts, ttl=ttl, pin=pin)
        life = math.inf if ttl is None else ttl
        for record in self.cache.path(self.ns, tip):
            new = Node(record.parent, prompt[: record.end], life, 0, 0)
            self.nodes.setdefault(record.id, new)
            self.use(record.id, life)
        if pin is not None:
            self.pins[tip, pin.owner] = self.time.wall + pin.seconds

    def do_read(self):
        prompt = self.random.choice(PROMPTS)
        match = find(self.cache, self.ns, prompt)
        if match is not None:
            read_all(self.cache, self.ns, match.nodes)
            self.use(match.nodes[-1].id)

    def do_lease(self):
        if (n := self.some_node()) is not None:
            seconds, owner = self.random.randint(1, 200), self.random.choice(OWNERS)
            try:
                lease = self.cache.lease(self.ns, n, owner, seconds)
            except GoneError:
                assert n not in self.current()
            else:
                assert n in self.current()
                self.leases.append((lease, n, self.time.boot + seconds))

    def do_renew(self):
        for i, (lease, n, until) in enumerate(self.leases):
            if self.random.random() < 0.3:
                if until > self.time.boot:
                    lease.renew(100)
                    self.leases[i] = lease, n, self.time.boot + 100
                else:
                    with pytest.raises(GoneError):
                        lease.renew(100)

    def do_release(self):
        if self.leases:
            self.leases.pop(self.random.randrange(len(self.leases)))[0].release()

    def do_pin(self):
        if (n := self.some_node()) is not None:
            seconds, owner = self.random.randint(1, 200), self.random.choice(OWNERS)
            current = n in self.current()
            try:
                self.cache.administration.pin(self.ns.id, n, owner, seconds)
            except GoneError:
                assert not current
            else:
                assert current
                self.pins[n, owner] = self.time.wall + seconds

    def do_unpin(self):
        if (n := self.some_node()) is not None:
            owner = self.random.choice(OWNERS)
            there = self.pins.pop((n, owner), 0) > self.time.wall
            assert self.cache.administration.unpin(self.ns.id, n, owner) == there

    def do_wait(self):
        self.time.passes(self.random.choice([1, 10, 50, 100]))

    def do_evict(self):
        self.cache._evictor.free(self.random.randint(1, 30_000))
        there = {bytes(n) for (n,) in self.cache._index.all("SELECT id FROM node")}
        gone = {n for n in self.nodes if bytes(n) not in there}
        assert not gone & self.held()
        self.lose(gone)

    def do_evict_all(self):
        evict_all(self.cache)
        self.lose(set(self.nodes) - self.held())

    def do_remove_expired(self):
        gone = set(self.nodes) - self.current() - self.held()
        assert remove_ended(self.cache) == len(gone)
        self.lose(gone)

    def do_clear(self):
        seconds = self.random.choice([None, 60, 200])
        last = math.inf if seconds is None else self.time.wall - seconds
        young = self.upward(n for n, node in self.nodes.items() if node.used > last)
        gone = set(self.nodes) - young - self.held()
        cleared = self.cache.administration.clear(older_than=seconds)
        assert cleared.removed_segments == len(gone)
        self.lose(gone)

    def do_reopen(self):
        self.cache.close()
        self.leases.clear()
        self.open()
        # A start removes what has expired.
        self.lose(set(self.nodes) - self.current() - self.held())

    # What must hold.

    def check(self):
        for lease, _, until in self.leases:
            assert lease.valid == (until > self.time.boot)
        for n in self.held():
            self.cache.path(self.ns, n)
        live = {
            key: until for key, until in self.pins.items() if until > self.time.wall
        }
        told = {(p.node, p.owner): p.until for p in self.cache.administration.pins()}
        assert told == live
        listed = self.cache.administration.leases()
        assert len(listed) == sum(t > self.time.boot for *_, t in self.leases)

    def check_lookups(self):
        """Without a use of what is found: the model would have to follow."""
        current = {(bytes(n)) for n in self.current()}
        index = self.cache._index
        noted = dict(index._touched)
        for prompt in PROMPTS:
            found = position(self.cache, self.ns, prompt)
            match = find(self.cache, self.ns, prompt)
            index._touched.clear()
            index._touched.update(noted)
            if match is not None:
                assert bytes(match.nodes[-1].id) in current
            path = self.longest(prompt)
            assert found == path

    def longest(self, prompt):
        ways = (self.nodes[n].prompt for n in self.current())
        return max((len(way) for way in ways if way == prompt[: len(way)]), default=0)


ACTIONS = {
    "store": 4,
    "read": 4,
    "lease": 3,
    "renew": 2,
    "release": 2,
    "pin": 2,
    "unpin": 1,
    "wait": 5,
    "evict": 3,
    "evict_all": 1,
    "remove_expired": 2,
    "clear": 1,
    "reopen": 0.3,
}


def run(root, seed, count):
    world = World(root, seed)
    try:
        for number in range(count):
            [action] = world.random.choices([*ACTIONS], [*ACTIONS.values()])
            getattr(world, f"do_{action}")()
            world.check()
            if number % 5 == 0:
                world.check_lookups()
        check_account(world.cache, root)
    finally:
        world.cache.close()


@pytest.mark.parametrize("seed", range(8))
def test_what_owners_hold_stays_and_nothing_else(root, seed):
    run(root, seed, 200)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
def test_what_owners_hold_stays_and_nothing_else_for_long(root, seed):
    run(root, seed, 600)
