"""Admission: in one step, or not at all."""

import errno
import os
from pathlib import Path

import attrs
import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.records import Admitted
from kvport.snapshot.errors import (
    CapacityError,
    DiskFullError,
    GoneError,
    KvportError,
    StorageError,
)
from tests.cache.builder import (
    ALL,
    COLD,
    DENSE,
    OTHER,
    check_account,
    claim,
    find,
    open_cache,
    position,
    read_all,
    space,
    store,
    walk,
    with_tokens,
)

TOKENS = list(range(1000))
ENDS = [256, 512, 700]


@pytest.fixture
def origin(tmp_path):
    """A path of three nodes with all classes of blobs, and the bytes of these."""
    with open_cache(tmp_path / "origin") as cache:
        ns = space(cache, ALL)
        tip = store(cache, ns, TOKENS, ENDS, kinds={700: {PointKind.PROMPT}})
        nodes = cache.path(ns, tip)
        blobs = {r.digest: bytes(cache.read(ns, r)) for n in nodes for r in n.blobs}
    nodes = [attrs.evolve(n, attestations=(claim(origins=[OTHER]),)) for n in nodes]
    nodes = with_tokens(nodes, encode_tokens(TOKENS))
    return nodes, blobs


def stage(cache, blobs, name="import-1"):
    directory = cache.staging(name)
    staged = {}
    for digest, data in blobs.items():
        staged[digest] = directory / digest.hex()
        staged[digest].write_bytes(data)
    return staged


def room(cache, blobs):
    return cache.reserve(sum(map(len, blobs.values())), files=len(blobs))


def picture(root):
    """Everything on disk, and every row, but for the touches of lookups."""
    tree = {str(path): path.stat().st_size for path in root.rglob("*")}
    return {path: size for path, size in tree.items() if "index.sqlite" not in path}


def rows(cache):
    """A dump of all rows, by table."""
    tables = ("ns", "node", "file", "blob", "numerics", "attest")
    everything = list(cache._index._connection.iterdump())
    return {
        name: [line for line in everything if line.startswith(f'INSERT INTO "{name}"')]
        for name in tables
    }


def test_an_admitted_path_restores_and_reads(cache, root, origin):
    nodes, blobs = origin
    ns = space(cache, ALL)
    with room(cache, blobs) as reservation:
        staged = stage(cache, blobs)
        assert walk(root) <= cache.stats().account.reserved
        assert cache.admit(ns, nodes, staged, reservation) == Admitted(3, 0)
        cache.discard_staging("import-1")
    check_account(cache, root)
    match = find(cache, ns, TOKENS)
    assert match.nodes == tuple(nodes)
    assert read_all(cache, ns, match.nodes) == list(blobs.values())
    assert find(cache, ns, TOKENS, exact=True) is None


def test_admitting_again_changes_nothing_but_claims(cache, root, origin):
    nodes, blobs = origin
    ns = space(cache, ALL)
    for round_, expected in enumerate((Admitted(3, 0), Admitted(0, 3))):
        with room(cache, blobs) as reservation:
            staged = stage(cache, blobs) if not round_ else {}
            assert cache.admit(ns, nodes, staged, reservation) == expected
    before = rows(cache)
    more = [
        attrs.evolve(n, attestations=(COLD,), kinds=frozenset({PointKind.FORK}))
        for n in nodes
    ]
    with room(cache, {}) as reservation:
        assert cache.admit(ns, more, {}, reservation) == Admitted(0, 3)
    assert len(rows(cache)["attest"]) == len(before["attest"]) + 3
    assert rows(cache)["file"] == before["file"]
    node = cache.path(ns, nodes[-1].id)[-1]
    assert node.kinds == {PointKind.FORK, PointKind.PROMPT}
    assert set(node.attestations) == {COLD, claim(origins=[OTHER])}


def test_what_is_stored_need_not_be_staged(cache, origin):
    nodes, blobs = origin
    ns = space(cache, ALL)
    have = {ref.digest for ref in nodes[0].blobs}
    store(cache, ns, TOKENS, ENDS[:1])
    assert all(cache.read(ns, r) == blobs[r.digest] for r in nodes[0].blobs)
    rest = {digest: data for digest, data in blobs.items() if digest not in have}
    with room(cache, rest) as reservation:
        done = cache.admit(ns, nodes, stage(cache, rest), reservation)
        assert done == Admitted(2, 1)
    assert position(cache, ns, TOKENS) == 700


def test_an_imported_path_and_our_own_stay_apart(cache, origin):
    nodes, blobs = origin
    ns = space(cache, ALL)
    own = store(cache, ns, TOKENS, ENDS, variant="ours")
    with room(cache, blobs) as reservation:
        cache.admit(ns, nodes, stage(cache, blobs), reservation)
    theirs = frozenset(node.id for node in nodes)
    assert find(cache, ns, TOKENS, within=theirs).nodes == tuple(nodes)
    assert find(cache, ns, TOKENS).tip == own  # made here, on a tie


def break_staged_file(staged, nodes, root):
    list(staged.values())[-1].unlink()


def break_staged_size(staged, nodes, root):
    path = list(staged.values())[3]
    path.write_bytes(path.read_bytes()[:-1])


def break_staged_name(staged, nodes, root):
    del staged[nodes[1].blobs[1].digest]


def break_parent(staged, nodes, root):
    del nodes[1]


def break_order(staged, nodes, root):
    nodes.reverse()


def break_name(staged, nodes, root):
    nodes[2] = attrs.evolve(nodes[2], id=NodeId(bytes(range(32))))


def break_last_file(staged, nodes, root):
    # No file any more, and so no rename, after others: as a FIFO it must not block.
    path = staged[nodes[-1].blobs[-1].digest]
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (break_staged_file, StorageError),
        (break_staged_size, GoneError),
        (break_staged_name, GoneError),
        (break_parent, GoneError),
        (break_order, GoneError),
        (break_name, ValueError),
        (break_last_file, GoneError),
    ],
)
def test_an_admission_that_fails_changes_nothing(cache, root, origin, harm, error):
    nodes, blobs = origin
    ns = space(cache, ALL)
    store(cache, ns, [5, *TOKENS], ENDS)
    with room(cache, blobs) as reservation:
        staged = stage(cache, blobs)
        harm(staged, nodes, root)
        tree, table = picture(root), rows(cache)
        with pytest.raises(error):
            cache.admit(ns, nodes, staged, reservation)
        assert picture(root) == tree
        assert rows(cache) == table
        cache.discard_staging("import-1")
    assert position(cache, ns, [5, *TOKENS]) == 700


@pytest.mark.parametrize("full", [True, False])
def test_a_volume_that_fails_undoes_an_admission(
    cache, root, origin, full, monkeypatch
):
    nodes, blobs = origin
    ns = space(cache, ALL)
    with room(cache, blobs) as reservation:
        staged = stage(cache, blobs)
        last = staged[nodes[-1].blobs[-1].digest]
        tree, table = picture(root), rows(cache)
        real = os.rename

        def refuse(source, target, **where):
            if Path(source).name == last.name:
                raise OSError(errno.ENOSPC if full else errno.EIO, "injected")
            real(source, target, **where)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            with pytest.raises(DiskFullError if full else StorageError):
                cache.admit(ns, nodes, staged, reservation)
        assert picture(root) == tree
        assert rows(cache) == table
        # A directory in the last one's place, on the other hand, makes place.
        (root / "ns" / ns.id / last.name / "deep").mkdir(parents=True)
        cache.admit(ns, nodes, staged, reservation)
        cache.discard_staging("import-1")
    read_all(cache, ns, nodes)
    check_account(cache, root)


def test_an_admission_evicts_for_its_rows_only_within_the_cap(root, origin):
    nodes, blobs = origin
    with open_cache(root, 5 * MIB) as cache:
        ns = space(cache, ALL)
        for number in range(8):
            store(cache, ns, [number, *TOKENS], [100], size=400_000)
        with room(cache, blobs) as reservation:
            cache.admit(ns, nodes, stage(cache, blobs), reservation)
            cache.discard_staging("import-1")
            assert walk(root) <= cache.stats().account.reserved <= 5 * MIB
        check_account(cache, root)
        assert position(cache, ns, TOKENS) == 700


def test_no_room_for_an_upload_is_an_error_before_a_byte_is_written(root):
    with open_cache(root, 5 * MIB) as cache:
        ns = space(cache, DENSE)
        tip = store(cache, ns, TOKENS, [100], size=3 * MIB)
        before = picture(root)
        with cache.lease(ns, tip, "test"), pytest.raises(CapacityError):
            cache.reserve(2 * MIB)
        assert picture(root) == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "x" * 65, "a\0"])
def test_an_import_id_that_is_a_path_is_refused(cache, name):
    with pytest.raises(ValueError, match="plain name"):
        cache.staging(name)
    with pytest.raises(ValueError, match="plain name"):
        cache.discard_staging(name)


def test_errors_name_no_paths_keys_or_tokens(cache, origin):
    nodes, blobs = origin
    ns = space(cache, ALL)
    with room(cache, blobs) as reservation, pytest.raises(KvportError) as caught:
        cache.admit(ns, nodes, {}, reservation)
    assert "/" not in caught.value.message
    assert nodes[0].key.hex() not in caught.value.message
