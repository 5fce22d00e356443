"""In which order state makes room; and that a plan names what then goes."""

import random
import threading
from collections import Counter

import pytest
from structlog.testing import capture_logs

from kvport.manifest.identity import PointKind
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.demand import Demand
from kvport.snapshot.cache.maintenance import Maintenance
from kvport.snapshot.cache.plan import Plan, PlanRow
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.records import RemovalReason
from tests.cache.builder import (
    ALL,
    DENSE,
    HYBRID,
    WINDOWED,
    blob_files,
    check_account,
    find,
    identity_of,
    judge,
    open_cache,
    position,
    segments,
    space,
    store,
    used,
    walk,
)

SIZE = 100_000
CAP = 12 * MIB
REASONS = RemovalReason


def prompt(number: int, length: int = 600) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def expire(cache, ns, numbers, when=1):
    """Set what a lifetime would have set."""
    for number in numbers:
        tip = find(cache, ns, prompt(number)).nodes[-1].id
        with cache._index.transaction():
            cache._index.all(
                "UPDATE node SET ttl = 1, expires = ? WHERE id = ?", (when, tip)
            )


def planned(plan: Plan) -> dict:
    return {(row.namespace, row.reason): row.nodes for row in plan.rows}


def told(removed) -> dict:
    return dict(Counter((gone.namespace, gone.reason) for gone in removed))


def test_the_order_is_expired_incompatible_pointless_quota_oldest(root):
    removed = []
    reasons = {}
    with open_cache(root, CAP, removed, judge=lambda _: reasons) as cache:
        spaces = {
            REASONS.EVICTED: space(cache, model=1),
            REASONS.QUOTA: space(cache, model=2),
            REASONS.POINTLESS: space(cache, HYBRID),
            REASONS.INCOMPATIBLE: space(cache, model=3),
            REASONS.EXPIRED: space(cache, model=4),
        }
        for ns in spaces.values():
            for number in range(6):
                # The state is at 100 only: what comes after it is pointless.
                store(cache, ns, prompt(number), [100, 200], size=SIZE, states=[100])
        expire(cache, spaces[REASONS.EXPIRED], range(6))
        reasons[spaces[REASONS.INCOMPATIBLE].id] = "for the test"
        cache._policies.put(
            spaces[REASONS.QUOTA].id, NamespaceSettings(quota_bytes=800_000)
        )
        cache._policies.judge()
        with cache._index.lock:
            victims = list(cache._evictor.choice().victims(Demand(missing=4 * MIB)))
        order = list(dict.fromkeys(victim.reason for victim in victims))
        assert order == list(reversed(spaces))
        count = Counter(victim.reason for victim in victims)
        # A parent expires with its only child, or later; here it never does.
        assert count[REASONS.EXPIRED] == 6
        assert count[REASONS.INCOMPATIBLE] == 12
        assert count[REASONS.POINTLESS] == 6
        assert count[REASONS.QUOTA] == 5
        before = cache.stats().account.blobs
        assert cache._evictor.free(4 * MIB)
        assert before - cache.stats().account.blobs >= 4 * MIB
        assert Counter(gone.reason for gone in removed) == count
        check_account(cache, root)


@pytest.mark.parametrize("layout", [DENSE, HYBRID])
def test_a_plan_passes_by_what_goes_meanwhile(root, layout):
    with open_cache(root) as cache:
        ns = space(cache, layout)
        for number in range(3):
            store(cache, ns, prompt(number), [100, 200])
        demand = Demand(missing=64 * MIB, thorough=True)
        victims = cache._evictor.choice().victims(demand)
        next(victims)
        assert cache.administration.clear().removed_segments == 6
        assert len(list(victims)) < 6
        check_account(cache, root)


def test_expired_paths_go_up_to_where_something_still_lives(root):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100, 200, 300])
        store(cache, ns, prompt(2), [100])
        with cache._index.transaction():
            cache._index.all("UPDATE node SET ttl = 1, expires = 1")
            cache._index.all(
                'UPDATE node SET expires = ? WHERE "end" = 200', (1 << 40,)
            )
        freed = cache.administration.settle()
        # 300 goes; 200 lives on, and so does what it hangs on.
        assert freed.nodes == {REASONS.EXPIRED: 2}
        assert freed.nbytes == 2 * 4096
        assert position(cache, ns, prompt(1)) == 200
        assert find(cache, ns, prompt(2)) is None
        with cache._index.transaction():
            cache._index.all("UPDATE node SET ttl = 1, expires = 1")
        assert cache.administration.settle().nodes == {REASONS.EXPIRED: 2}
        check_account(cache, root)


def test_a_parent_lives_as_long_as_the_child_it_lost(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        for number, (parent, child, expected) in enumerate(
            [(5, 7, 7), (7, 5, 7), (0, 5, 0), (5, 0, 0)]
        ):
            store(cache, ns, prompt(number), [100, 200])
            nodes = find(cache, ns, prompt(number)).nodes
            with cache._index.transaction():
                for node, when in zip(nodes, (parent, child), strict=True):
                    cache._index.all(
                        "UPDATE node SET expires = ? WHERE id = ?", (when, node.id)
                    )
            cache.report_damage(ns, nodes[-1].blobs[0])
            [(found,)] = cache._index.all(
                "SELECT expires FROM node WHERE id = ?", (nodes[0].id,)
            )
            assert found == expected


@pytest.mark.parametrize("layout", [HYBRID, WINDOWED, ALL])
def test_rows_behind_the_last_point_are_pointless(root, layout):
    removed = []
    with open_cache(root, CAP, removed) as cache:
        ns = space(cache, layout)
        kinds = {200: {PointKind.PROMPT}}
        at = {"states": [200], "windows": [200], "kinds": kinds}
        store(cache, ns, prompt(1), [100, 200, 300, 400], **at)
        store(cache, ns, prompt(2), [100, 200], **at)
        # Never a point: a request that was broken off.
        store(cache, ns, prompt(3), [100, 200, 300], states=[], windows=[])
        chain = cache.chain(ns, ROOT_NODE, "test")
        for segment in segments(ns, prompt(4), [100, 200], states=[], windows=[]):
            chain.append(segment)
        cache.flush()
        assert planned(cache.administration.plan(gc=True)) == {
            (ns.id, REASONS.POINTLESS): 5
        }
        freed = cache.administration.gc()
        assert freed.nodes == {REASONS.POINTLESS: 5}
        assert told(removed) == {(ns.id, REASONS.POINTLESS): 5}
        assert cache.path(ns, chain.tip)[-1].end == 200
        for number in (1, 2):
            assert position(cache, ns, prompt(number)) == 200
        chain.close()
        cache.flush()
        assert cache.administration.gc().nodes == {REASONS.POINTLESS: 2}
        check_account(cache, root)


def test_no_row_of_a_full_layout_is_pointless(root):
    with open_cache(root, CAP) as cache:
        store(cache, space(cache), prompt(1), [100, 200, 300])
        assert not cache.administration.plan(gc=True).rows
        assert not cache.administration.gc().nodes


def test_leased_nodes_never_go(root):
    removed = []
    reasons = {}
    with open_cache(root, CAP, removed, judge=lambda _: reasons) as cache:
        ns = space(cache, HYBRID)
        tip = store(cache, ns, prompt(1), [100, 200], states=[])
        with cache.lease(ns, tip, "test"):
            reasons[ns.id] = "for the test"
            expire_all = "UPDATE node SET ttl = 1, expires = 1"
            with cache._index.transaction():
                cache._index.all(expire_all)
            cache.configure(ns.id, NamespaceSettings(quota_bytes=1))
            assert not cache.administration.gc().nodes
            plan = cache.administration.plan(cap=4 * MIB, gc=True)
            over = 2 * 4096 - 1
            assert plan == Plan((), over, over, 0, {ns.id: over})
            assert cache.path(ns, tip)
        assert cache.administration.gc().nodes == {REASONS.EXPIRED: 2}


def mixed(cache, rng: random.Random) -> None:
    """Some of everything: shared blobs, branches, points, times."""
    for layout in (DENSE, HYBRID, ALL):
        for model in range(2):
            ns = space(cache, layout, model=model)
            tips = []
            for number in range(12):
                ends = sorted(rng.sample(range(1, 600), rng.randrange(1, 6)))
                points = {end: {PointKind.PROMPT} for end in ends if rng.random() < 0.6}
                tokens = prompt(rng.randrange(6))
                store(
                    cache, ns, tokens, ends, states=list(points), kinds=points,
                    variant=rng.randrange(2), size=rng.choice([1000, 30_000, SIZE]),
                )  # fmt: skip
                tips.append((ns, number))
    rows = cache._index.all("SELECT n FROM node")
    with cache._index.transaction():
        for (n,) in rng.sample(rows, len(rows) // 4):
            cache._index.all(
                "UPDATE node SET ttl = 1, expires = ? WHERE n = ?",
                (rng.choice([1, 2, 3, 1 << 40]), n),
            )


def test_a_start_with_a_smaller_cap_removes_what_was_planned(root):
    """The ballast of the larger cap is given back, rather than state."""
    with open_cache(root, 64 * MIB) as cache:
        ns = space(cache)
        for number in range(40):
            store(cache, ns, prompt(number), [100], size=SIZE)
        plan = cache.administration.plan(cap=5 * MIB)
        assert cache.administration.plan().rows == ()
        with cache.lease(ns, find(cache, ns, prompt(39)).nodes[-1].id, "test"):
            held = cache.administration.plan(floor=1 << 60)
            assert held.missing > held.in_use > SIZE
        assert cache.administration.plan(floor=1 << 60).in_use == 0
    assert plan.missing == 0
    removed = []
    with open_cache(root, 5 * MIB, removed) as cache:
        assert len(removed) == plan.nodes > 0
        assert (root / "ballast").stat().st_size == 5 * MIB // 32
        check_account(cache, root)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_names_the_nodes_that_then_go(root, seed):
    removed, rng = [], random.Random(seed)
    with open_cache(root, 2 * CAP, removed) as cache:
        mixed(cache, rng)
        infos = cache.administration.namespaces()
        judge(cache, {rng.choice(infos).id: "for the test"})
        small = {info.id: 400_000 for info in rng.sample(infos, 2)}
        cache.configure(infos[0].id, NamespaceSettings(quota_bytes=3 * MIB))
        removed.clear()

        plan = cache.administration.plan(quotas=small)
        assert not removed
        for name, nbytes in small.items():
            cache._policies.put(name, NamespaceSettings(quota_bytes=nbytes))
        freed = cache.administration.settle()
        assert planned(plan) == told(removed)
        assert plan.nbytes == freed.nbytes > 0

        removed.clear()
        plan = cache.administration.plan(gc=True)
        freed = cache.administration.gc()
        assert planned(plan) == told(removed)
        assert plan.nbytes == freed.nbytes
        check_account(cache, root)


@pytest.mark.parametrize("seed", range(3))
def test_b24_a_start_removes_what_was_planned_and_logged(root, seed):
    rng = random.Random(seed)
    with open_cache(root, 2 * CAP) as cache:
        mixed(cache, rng)
        ns = space(cache)
        tip = store(cache, ns, prompt(99), [100], size=SIZE)
        files = blob_files(root)
        plan = cache.administration.plan(cap=5 * MIB)
        assert cache.administration.plan().rows == tuple(
            row for row in plan.rows if row.reason is REASONS.EXPIRED
        )
        assert planned(plan)
        assert plan.missing == 0
        assert blob_files(root) == files
    removed = []
    with capture_logs() as logs, open_cache(root, 5 * MIB, removed) as cache:
        assert planned(plan) == told(removed)
        assert cache.path(ns, tip)
        check_account(cache, root)
    said = {(log.get("namespace"), log.get("nodes")) for log in logs}
    assert {(row.namespace, row.nodes) for row in plan.rows} <= said


def test_a_plan_for_a_smaller_cap_is_what_its_start_removes(root):
    """Also by uses that are only noted, and where pins leave too little to shares."""
    small, removed = 5 * MIB, []
    quota = NamespaceSettings(quota_bytes=3 * MIB)
    with open_cache(root, 32 * MIB) as cache:
        quiet, busy = space(cache), space(cache, model=1)
        cache.configure(quiet.id, quota)
        for n in range(10):
            store(cache, quiet, prompt(n), [100], size=MIB // 4, variant=n)
            tip = store(cache, busy, prompt(n), [100], size=MIB // 4, variant=n)
            if n < 8:
                cache.administration.pin(busy.id, tip, "a", 3600)
        assert position(cache, quiet, prompt(0)) == 100  # noted
        plan = cache.administration.plan(cap=small)
    assert plan.missing == 0

    def settings(known):
        return quota if known.id == quiet.id else NamespaceSettings()

    with open_cache(root, small, removed, settings=settings) as cache:
        assert walk(root) <= cache.stats().account.reserved <= small
        assert cache.stats().pins == 8
        assert position(cache, quiet, prompt(0)) == 100
        by_namespace = Counter(gone.namespace for gone in removed)
        assert by_namespace == {row.namespace: row.nodes for row in plan.rows}
        check_account(cache, root)


def test_a_plan_tells_ages_and_what_stays_missing(root):
    with open_cache(root, CAP) as cache:
        ns = cache.namespace(
            identity_of(DENSE), "default", 256, model="m", source="/nowhere"
        )
        tips = [
            store(cache, ns, prompt(n), [100], size=size)
            for n, size in enumerate([3 * MIB, MIB, MIB, MIB])
        ]
        with cache.lease(ns, tips[0], "test"):
            plan = cache.administration.plan(cap=4 * MIB)
        [row] = plan.rows
        assert isinstance(row, PlanRow)
        assert (row.namespace, row.model, row.nodes) == (ns.id, "m", 3)
        assert row.nbytes == 3 * (MIB + 4096)
        assert 1_700_000_000 < row.oldest <= row.newest
        assert plan.missing > 0
        assert used(cache, ns) == 6 * MIB + 4 * 4096


def test_maintenance_removes_what_has_expired_unasked(root, monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(Maintenance.__init__, "__defaults__", (0.02,))
    opening = Opening(
        root=root, cap_bytes=CAP, on_removed=lambda _: told.set(), free_floor=0
    )
    with Cache.open(opening) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100])
        assert not told.wait(0.1)
        expire(cache, ns, [1])
        assert told.wait(20)
        assert find(cache, ns, prompt(1)) is None


def test_gc_takes_files_that_no_row_speaks_of(root):
    with open_cache(root, CAP) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100, 200])
        kept = blob_files(root)
        directory = root / "ns" / ns.id
        (directory / f"{'ab' * 32}.0badf00d").write_bytes(bytes(9000))
        (directory / ("cd" * 32)).write_bytes(bytes(9000))
        (directory / "left").mkdir()
        (root / "staging" / "gone").mkdir()
        (root / "staging" / "gone" / "x").write_bytes(bytes(9000))
        upload = cache.staging("running") / "part"
        upload.write_bytes(b"x")
        freed = cache.administration.gc()
        assert freed.nodes == {}
        assert freed.nbytes == 3 * 12_288 + 2 * 4096
        assert blob_files(root) == kept
        assert not (root / "staging" / "gone").exists()
        assert upload.exists()
        cache.discard_staging("running")
        check_account(cache, root)
