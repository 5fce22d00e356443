"""Paths that are pruned as they grow: what stays restores, what goes is gone whole."""

import random
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.reader import Reader
from kvport.snapshot.cache.records import RemovalReason
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.cache.schema import kind_bits
from kvport.snapshot.errors import DiskFullError, GoneError
from tests.cache.builder import (
    DENSE,
    blob_files,
    check_account,
    find,
    open_cache,
    position,
    read_all,
    segments,
    space,
    store,
    with_tokens,
)
from tests.cache.conversations import ALL, HYBRID, KEEP, WINDOWED, Talk

FORK, PROMPT, REPLY = PointKind.FORK, PointKind.PROMPT, PointKind.REPLY


def blobs_of(cache, blob_class):
    [numbers] = cache.stats().namespaces
    kind = numbers.kinds.get(blob_class)
    return kind.files if kind else 0


def check_whole(cache, root):
    """No orphan, no file missing, and an account of what the disk holds."""
    assert len(blob_files(root)) == sum(n.files for n in cache.stats().namespaces)
    ((doomed,),) = cache._index.all("SELECT count(*) FROM file WHERE NOT live")
    assert not doomed
    assert not cache._index.all(
        "SELECT n FROM file WHERE n NOT IN (SELECT file FROM blob)"
    )
    check_account(cache, root)


@pytest.mark.parametrize("layout", [HYBRID, WINDOWED, ALL])
def test_a_long_conversation_keeps_a_constant_number_of_points(cache, root, layout):
    talk = Talk(cache, space(cache, layout))
    for number in range(20):
        expected = len(talk.tokens)
        talk.turn()
        # The reply's end, and so nothing is computed again.
        assert talk.restored == expected
        end = len(talk.tokens)
        strides = [
            p for p in range(100, end + 1, 100) if end - p <= 300 or p % 1000 == 0
        ]
        kept = {*strides, end - 61, end}
        assert {at for at, _ in talk.points()} == kept
        if layout.has(BlobClass.STATE):
            assert blobs_of(cache, BlobClass.STATE) == len(kept) <= 8
        if layout.has(BlobClass.WINDOW) and number > 10:
            # Of 2,400 rows about those before the points: never more than 3 blobs each.
            assert blobs_of(cache, BlobClass.WINDOW) <= 3 * len(kept)
    for at in kept:
        assert talk.restores(at)
    assert not talk.restores(200)
    read_all(cache, talk.ns, cache.path(talk.ns, talk.tip))
    stats = cache.stats()
    assert not stats.total.removed
    assert stats.total.damaged == stats.total.failed_prunings == 0
    assert stats.total.captured_tokens == len(talk.tokens)
    per_token = sum(stats.total.written.values()) / 2400
    assert stats.total.written_per_captured_token == pytest.approx(per_token)
    for blob_class, pruned in stats.total.pruned.items():
        assert stats.total.written[blob_class] == pruned.nbytes + 1000 * blobs_of(
            cache, blob_class
        )
        assert pruned.nbytes == 1000 * pruned.blobs
    assert BlobClass.KV not in stats.total.pruned
    check_whole(cache, root)


@pytest.mark.parametrize("layout", [HYBRID, ALL])
def test_a_thinking_template_leaves_no_dead_branches(root, layout):
    removed = []
    with open_cache(root, removed=removed) as cache:
        talk = Talk(cache, space(cache, layout))
        for number in range(10):
            fork = talk.restored if number else 0
            talk.turn(thinking=True)
            assert (talk.restored > fork) == bool(number)
            path = {node.id for node in cache.path(talk.ns, talk.tip)}
            [numbers] = cache.stats().namespaces
            assert numbers.nodes == len(path)
        kinds = [kind for _, kinds in talk.points() for kind in kinds]
        assert [kinds.count(kind) for kind in (FORK, PROMPT, REPLY)] == [2, 1, 1]
        assert all(talk.restores(at) for at, _ in talk.points())
        # What hung on a fork no longer holds the rows above it.
        assert blobs_of(cache, BlobClass.WINDOW) <= 3 * len([*talk.points()])
        assert {gone.reason for gone in removed} == {RemovalReason.SUPERSEDED}
        assert cache.stats().total.removed == {RemovalReason.SUPERSEDED: len(removed)}
        check_whole(cache, root)


def test_a_point_that_agents_share_stays(cache, root):
    talk = Talk(cache, space(cache, ALL))
    talk.turn()
    talk.turn()
    shared = len(talk.tokens)
    # Side by side: each one restores before another has ended.
    agents = [talk.branch(name) for name in range(1, 11)]
    chains = [cache.chain(talk.ns, talk.tip, "agent", KEEP) for _ in agents]
    for agent, chain in zip(agents, chains, strict=True):
        agent.tokens += range(agent.name * 1000, agent.name * 1000 + 40)
        cuts = [shared + 19, shared + 40]
        kinds = {cuts[0]: {PROMPT}, cuts[1]: {REPLY}}
        for segment in segments(talk.ns, agent.tokens, cuts, start=shared, kinds=kinds):
            chain.append(segment)
    for agent, chain in zip(agents, chains, strict=True):
        chain.close()
        cache.flush()
        agent.tip = chain.tip
    for _ in range(4):
        talk.turn()
    assert dict(talk.points())[shared] == {REPLY}
    assert talk.restores(shared)
    for agent in agents:
        assert agent.restores(len(agent.tokens))
        agent.turn(20, 20)
        assert agent.restored == shared + 40
    check_whole(cache, root)


def test_rows_above_a_fork_stay_for_the_branches_below_it(cache, root):
    talk = Talk(cache, space(cache, ALL), retention=Retention(newest=1))
    talk.turn(thinking=True)
    fork = 50
    other = talk.branch(1)
    other.tokens = other.tokens[:fork]
    talk.turn(thinking=True)
    assert talk.restored == fork
    # Its own fork is near: that point needs rows above the first one.
    other.turn(30, 10, thinking=True)
    assert other.restored == fork
    points = dict(other.points())
    assert any(FORK in points[at] and fork < at < fork + 48 for at in points)
    for _ in range(4):
        talk.turn(thinking=True)
    assert not talk.restores(fork)
    assert fork not in dict(talk.points())
    for at in points:
        if at > fork:
            assert other.restores(at)
    check_whole(cache, root)


def test_other_branches_lose_no_point(root):
    """Any tree of turns: what one path's end takes is its own, or dead."""
    with open_cache(root, 256 * MIB) as cache:
        ns, rng = space(cache, ALL), random.Random(7)
        talks = [Talk(cache, ns, retention=Retention(newest=120, every=500))]
        for _ in range(25):
            talk = rng.choice(talks)
            before = {other.name: standing(other) for other in talks}
            stops = kinds_by_node(cache)
            if rng.random() < 0.3 and len(talks) < 6:
                # From an earlier point, where there is one: an edit of the history.
                starts = [at for _, at in standing(talk)] or [0]
                talk = talk.branch(len(talks))
                talk.tokens = talk.tokens[: rng.choice(starts)]
                talks.append(talk)
            talk.turn(
                rng.choice([12, 30, 70]), rng.choice([4, 40]),
                thinking=rng.random() < 0.5,
            )  # fmt: skip
            path = {node.id for node in cache.path(ns, talk.tip)}
            left = kinds_by_node(cache)
            fork = kind_bits([FORK])
            assert not any(stops[node] & fork for node in stops.keys() - left.keys())
            for other in talks:
                for node, at in before.get(other.name, ()):
                    if node in left and node not in path:
                        assert restores_through(cache, ns, node, at)
                        assert left[node] == stops[node]
            for at, _ in talk.points():
                assert talk.restores(at)
        assert cache.stats().total.removed.keys() == {RemovalReason.SUPERSEDED}
        check_whole(cache, root)


def kinds_by_node(cache):
    return dict(cache._index.all("SELECT id, kinds FROM node"))


def standing(talk):
    """Points of a conversation's last path that restore now."""
    try:
        path = talk.cache.path(talk.ns, talk.tip)
    except GoneError:
        return []
    return [(n.id, n.end) for n in path if n.kinds and talk.restores(n.end)]


def restores_through(cache, ns, node, at):
    return attrs.evolve(Talk(cache, ns), tip=node).restores(at)


def test_a_leased_path_is_left_alone(cache, root):
    talk = Talk(cache, space(cache, ALL))
    talk.turn()
    talk.turn()
    with cache.lease(talk.ns, talk.tip, "export") as lease:
        before = cache.path(talk.ns, lease.tip)
        tail = len(before)
        for _ in range(5):
            talk.turn()
        # What hangs below is pruned all the same.
        below = cache.path(talk.ns, talk.tip)[tail:]
        assert sum(PROMPT in node.kinds for node in below) == 1
        assert cache.path(talk.ns, lease.tip) == before
        read_all(cache, talk.ns, before)
    talk.turn()
    after = cache.path(talk.ns, before[-1].id)
    assert [node.kinds for node in after] != [node.kinds for node in before]
    with pytest.raises(GoneError):
        read_all(cache, talk.ns, before)
    assert cache.stats().total.damaged == 0
    check_whole(cache, root)


def test_a_leased_branch_is_not_dead(cache, root):
    talk = Talk(cache, space(cache, ALL))
    talk.turn(thinking=True)
    tail = talk.tip
    with cache.lease(talk.ns, tail, "export"):
        before = cache.path(talk.ns, tail)
        for _ in range(4):
            talk.turn(thinking=True)
        assert cache.path(talk.ns, tail) == before
        read_all(cache, talk.ns, before)
    check_whole(cache, root)


def pruned_path(cache):
    """A path of three points of which two are pruned, and what it was made of."""
    ns = space(cache, ALL)
    tokens, cuts = list(range(300)), [100, 200, 300]
    options = {"kinds": {cut: {REPLY} for cut in cuts}}
    tip = store(cache, ns, tokens, cuts, **options)
    whole = cache.path(ns, tip)
    data = {r.digest: bytes(cache.read(ns, r)) for n in whole for r in n.blobs}
    store(cache, ns, tokens, cuts, retention=Retention(), **options)
    assert [len(node.blobs) for node in cache.path(ns, tip)] == [1, 1, 3]
    assert position(cache, ns, tokens[:200]) == 0
    return ns, tokens, cuts, options, whole, data


def test_a_pruned_node_that_is_stored_again_is_whole_again(cache, root):
    ns, tokens, cuts, options, whole, _ = pruned_path(cache)
    check_whole(cache, root)
    before = cache.stats().total
    assert store(cache, ns, tokens, cuts, **options) == whole[-1].id
    assert cache.path(ns, whole[-1].id) == whole
    assert position(cache, ns, tokens[:200]) == 200
    stats = cache.stats()
    after = stats.total
    # Four blobs were written again, and no token was new.
    assert sum(after.written.values()) == sum(before.written.values()) + 4000
    assert after.captured_tokens == before.captured_tokens == 300
    assert [numbers.nodes for numbers in stats.namespaces] == [3]
    check_whole(cache, root)


def test_a_read_between_pruning_and_storing_again_finds_no_damage(cache, monkeypatch):
    ns, tokens, cuts, options, whole, _ = pruned_path(cache)
    report = Reader.report

    def late(*arguments):
        store(cache, ns, tokens, cuts, **options)
        return report(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "report", late)
        with pytest.raises(GoneError):
            read_all(cache, ns, whole)
    assert cache.stats().total.damaged == 0
    read_all(cache, ns, whole)


def test_a_pruned_node_that_is_admitted_again_is_whole_again(cache, root):
    ns, tokens, _, _, whole, data = pruned_path(cache)
    size = sum(map(len, data.values()))
    with cache.reserve(size, files=len(data)) as reservation:
        staged = {}
        for digest, content in data.items():
            staged[digest] = cache.staging("again") / digest.hex()
            staged[digest].write_bytes(content)
        nodes = with_tokens(whole, encode_tokens(tokens))
        done = cache.admit(ns, nodes, staged, reservation)
        cache.discard_staging("again")
    assert (done.admitted_segments, done.present_segments) == (0, 3)
    assert cache.path(ns, whole[-1].id) == whole
    assert position(cache, ns, tokens[:200]) == 200
    check_whole(cache, root)


def test_a_shared_blob_stays_for_the_node_that_needs_it(cache, root):
    ns, tokens = space(cache, HYBRID), list(range(300))
    kinds = {cut: {REPLY} for cut in (100, 200)}
    [first, second] = segments(ns, tokens, [100, 200], kinds=kinds)
    state = first.blobs[BlobClass.STATE]
    chain = cache.chain(ns, ROOT_NODE, "test", Retention())
    chain.append(first)
    chain.append(attrs.evolve(second, blobs={**second.blobs, BlobClass.STATE: state}))
    chain.close()
    cache.flush()
    assert cache.stats().total.pruned[BlobClass.STATE].blobs == 1
    path = cache.path(ns, chain.tip)
    assert [node.blob(BlobClass.STATE) is None for node in path] == [True, False]
    read_all(cache, ns, path)
    check_whole(cache, root)


def test_full_layers_keep_everything(cache, root):
    talk = Talk(cache, space(cache, DENSE), retention=Retention())
    for _ in range(4):
        talk.turn()
    stats = cache.stats()
    assert not stats.total.pruned
    assert not stats.total.removed
    prompts = [at for at, kinds in talk.points() if PROMPT in kinds]
    assert len(prompts) == 4
    check_whole(cache, root)


def test_more_than_one_commit_holds_is_pruned_in_several(root):
    with open_cache(root, 5 * MIB) as cache:
        assert cache._index.rows_per_removal < 10
        talk = Talk(cache, space(cache, ALL), retention=None)
        for _ in range(4):
            talk.turn(20, 20)
            talk.turn(20, 20, thinking=True)
        talk.retention = Retention()
        talk.turn(20, 20)
        assert sum(PROMPT in kinds for _, kinds in talk.points()) == 1
        assert (
            cache.stats().total.pruned[BlobClass.STATE].blobs
            > cache._index.rows_per_removal
        )
        assert RemovalReason.SUPERSEDED in cache.stats().total.removed
        assert all(talk.restores(at) for at, _ in talk.points())
        check_whole(cache, root)


def test_a_pruning_that_fails_harms_no_chain(cache, root, monkeypatch):
    talk = Talk(cache, space(cache, ALL))
    talk.turn()

    def refuse(*_args):
        raise DiskFullError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "drop", refuse)
        talk.turn()
    stats = cache.stats()
    assert stats.total.failed_prunings == 1
    assert not stats.total.skipped
    assert not stats.total.pruned
    assert stats.leases == 0
    assert sum(PROMPT in kinds for _, kinds in talk.points()) == 2
    talk.turn()
    assert sum(PROMPT in kinds for _, kinds in talk.points()) == 1
    check_whole(cache, root)


def test_a_path_that_was_removed_meanwhile_is_no_failure(cache, root):
    ns = space(cache, ALL)
    chain = cache.chain(ns, ROOT_NODE, "test", Retention())
    for segment in segments(ns, list(range(300)), [100, 200]):
        chain.append(segment)
    cache.flush()
    cache.report_damage(ns, cache.path(ns, chain.tip)[0].blobs[0])
    chain.close()
    cache.flush()
    assert cache.stats().total.failed_prunings == 0
    assert find(cache, ns, list(range(300))) is None
    check_whole(cache, root)


def test_a_process_killed_between_commit_and_unlink_leaves_no_orphan(root):
    child = subprocess.run(
        [sys.executable, "-m", "tests.cache.pruning_child", root],
        cwd=Path(__file__).parents[2], check=False, capture_output=True,
    )  # fmt: skip
    assert child.returncode == -9, child.stderr
    files = blob_files(root)
    removed = []
    with open_cache(root, removed=removed) as cache:
        assert len(blob_files(root)) < len(files)
        assert not removed
        stats = cache.stats()
        assert stats.total.damaged == stats.index_resets == 0
        check_whole(cache, root)
        # The first turn's tail went in that commit; the second one stands.
        talk = Talk(cache, space(cache, ALL))
        talk.turn(thinking=True)
        assert talk.restored == 50
        read_all(cache, talk.ns, cache.path(talk.ns, talk.tip))
        check_whole(cache, root)
