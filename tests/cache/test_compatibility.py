"""State that cannot be used any more: counted, shown, and the first to make room."""

import functools
import os

import attrs
from structlog.testing import capture_logs

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.namespaces import KnownNamespace, unusable
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.records import RemovalReason
from tests.cache.builder import (
    BLOCK,
    DENSE,
    check_account,
    identity_of,
    judge,
    open_cache,
    position,
    space,
    store,
    used,
    walk,
)

SIZE = 400_000
CAP = 12 * MIB
JUDGE = functools.partial(unusable, mlx_lm="0.32.2", is_directory=os.path.isdir)


def prompt(number: int, length: int = 300) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def known(name: str, model: int = 0, source: str = "", loaded: int = 0, **identity):
    made = attrs.evolve(identity_of(DENSE, model), **identity)
    return KnownNamespace(1, name, made, "default", BLOCK, "m", source, loaded)


def judged(*namespaces, there=("/here",)):
    return unusable(namespaces, mlx_lm="0.32.2", is_directory=lambda p: p in there)


def test_state_of_another_engine_is_incompatible():
    found = judged(known("a"), known("b", mlx_lm="0.31.0"))
    assert found == {"b": "made by mlx-lm 0.31.0"}


def test_state_of_a_model_that_is_gone_is_incompatible():
    found = judged(known("a", source="/here"), known("b", source="/gone"), known("c"))
    assert found == {"b": "its model's directory is gone"}


def test_state_of_files_that_have_changed_is_incompatible():
    found = judged(
        known("old", model=1, source="/here", loaded=5),
        known("new", model=2, source="/here", loaded=9),
        # Another form of keys and values, of the same files.
        known("form", model=2, source="/here", loaded=3, kv="q8"),
        known("other", model=3, source="", loaded=1),
    )
    assert found == {"old": "its model's files have changed"}


def test_state_that_this_version_cannot_read_is_incompatible(root):
    with open_cache(root, CAP, judge=JUDGE) as cache:
        ns = space(cache)
        store(cache, ns, prompt(1), [100])
        with cache._index.transaction():
            cache._index.all("UPDATE ns SET identity = '{}'")
            cache._index.seal_namespace(ns.id)
    with open_cache(root, CAP, judge=JUDGE) as cache:
        [info] = cache.administration.namespaces()
        assert info.incompatible == "its identity is of another version"
        assert cache.administration.gc().nodes == {RemovalReason.INCOMPATIBLE: 1}
        check_account(cache, root)


def test_models_are_recorded_with_their_namespaces(root, tmp_path):
    with open_cache(root, CAP, judge=JUDGE) as cache:
        first = space(cache)
        [info] = cache.administration.namespaces()
        assert (info.model, info.source, info.loaded) == ("", "", 0)
        space(cache, model=0)
        load = {"model": "m", "source": str(tmp_path), "loaded": 1_800_000_000}
        cache.namespace(first.identity, "default", BLOCK, **load)
        [info] = cache.administration.namespaces()
        assert (info.model, info.source) == ("m", str(tmp_path))
        assert info.loaded == 1_800_000_000
        assert info.incompatible is None
        # An import makes it without a model: what was known stays.
        assert space(cache) == first
    with open_cache(root, CAP, judge=JUDGE) as cache:
        [again] = cache.administration.namespaces()
        assert again == info


def test_b13_the_cap_holds_at_start_and_state_of_others_goes_first(root):
    """A directory above the cap, mostly of a model that is gone; then traffic."""
    with open_cache(root, 4 * CAP) as cache:
        stale, live = space(cache, model=1), space(cache)
        for number in range(5):
            store(cache, live, prompt(number), [100], size=SIZE)
        for number in range(50):
            store(cache, stale, prompt(number), [100, 200], size=SIZE)
        assert walk(root) > 3 * CAP
    removed = []
    with open_cache(root, CAP, removed, judge=lambda _: {stale.id: "gone"}) as cache:
        check_account(cache, root)
        assert {gone.reason for gone in removed} == {RemovalReason.INCOMPATIBLE}
        # Older than all of the stale state, and still there.
        assert all(position(cache, live, prompt(n)) == 100 for n in range(5))
        assert used(cache, stale) > 0
        for number in range(5, 20):
            store(cache, live, prompt(number), [100], size=SIZE)
            assert walk(root) <= cache.stats().account.reserved <= CAP
        assert all(position(cache, live, prompt(n)) == 100 for n in range(20))
        assert {gone.reason for gone in removed} == {RemovalReason.INCOMPATIBLE}


def test_b14_another_models_bytes_do_not_raise_the_cap(root):
    with open_cache(root, CAP) as cache:
        first = space(cache)
        for number in range(20):
            store(cache, first, prompt(number), [100], size=SIZE)
    with open_cache(root, CAP) as cache:
        assert cache.stats().account.cap == CAP
        second = space(cache, model=1)
        for number in range(40):
            store(cache, second, prompt(number), [100], size=SIZE)
            assert walk(root) <= CAP
        check_account(cache, root)


def test_b15_unusable_state_above_the_cap_makes_room_for_new(root):
    with open_cache(root, 2 * CAP) as cache:
        for model in range(1, 4):
            stale = space(cache, model=model)
            for number in range(12):
                store(cache, stale, prompt(number), [100], size=SIZE)
    with (
        capture_logs() as logs,
        open_cache(
            root, CAP, judge=lambda known: {one.id: "updated" for one in known}
        ) as cache,
    ):
        assert "cache_namespace_incompatible" in {log["event"] for log in logs}
        infos = cache.administration.namespaces()
        assert [info.incompatible for info in infos] == ["updated"] * 3
        live = space(cache)
        judge(cache, {one.id: "updated" for one in infos})
        for number in range(20):
            store(cache, live, prompt(number), [100], size=SIZE)
        assert not cache.stats().total.skipped
        assert all(position(cache, live, prompt(n)) == 100 for n in range(20))
        left = sum(used(cache, space(cache, model=n)) for n in range(1, 4))
        freed = cache.administration.gc()
        assert freed.nbytes == left
        assert used(cache, live) == 20 * 401_408
        check_account(cache, root)


def test_incompatible_state_has_no_protected_share(root):
    reasons = {}
    with open_cache(root, CAP, judge=lambda _: reasons) as cache:
        stale, live = space(cache, model=1), space(cache)
        for ns in (stale, live):
            cache.configure(ns.id, NamespaceSettings(quota_bytes=8 * MIB))
        for number in range(10):
            store(cache, stale, prompt(number), [100], size=SIZE)
        reasons[stale.id] = "gone"
        infos = {info.id: info for info in cache.administration.namespaces()}
        assert infos[stale.id].share == 0
        assert infos[live.id].share == 8 * MIB
        for number in range(18):
            store(cache, live, prompt(number), [100], size=SIZE)
        assert position(cache, live, prompt(0)) == 100
