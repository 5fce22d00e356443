"""What becomes of a model's state when the model goes."""

import pytest
from structlog.testing import capture_logs

from kvport.manifest.limits import GIB
from kvport.snapshot.cache.clear import KeptReason
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.records import Pin, RemovalReason
from kvport.snapshot.engine.requests import Request
from kvport.snapshot.errors import UnknownNamespaceError
from kvport.snapshot.namespaces import Change
from kvport.snapshot.node import Node, NodeSettings
from tests.cache.builder import check_account
from tests.engine.conftest import Running

PROMPT = list(range(1, 290))


@pytest.fixture
def node(tmp_path):
    with Node.open(NodeSettings(home=tmp_path / "home", cap_bytes=GIB)) as opened:
        yield opened


def complete(node, name, tokens=PROMPT, **options):
    request = Request(tokens=tokens, max_tokens=4, ignore_eos=True, **options)
    return Running(node.engine, name, request).answer()


def reclaiming(node, name):
    """Have its state removed when the model goes; answers the namespace's id."""
    namespace = node.engine.store(name).namespace.id
    node.volume.cache.configure(namespace, NamespaceSettings(reclaim_on_unload=True))
    return namespace


def check(node):
    node.volume.cache.flush()
    check_account(node.volume.cache, node.settings.home / "cache")


def test_b36_state_is_reclaimed_where_that_is_set_and_nowhere_else(node, model_dir):
    node.load_model(str(model_dir("llama")))
    node.load_model(str(model_dir("qwen3_5")))
    reclaiming(node, "llama")
    for name in ("llama", "qwen3_5"):
        complete(node, name)
    running = Running(
        node.engine,
        "qwen3_5",
        Request(tokens=PROMPT[::-1], max_tokens=400, ignore_eos=True),
    )
    assert node.residents.unload("llama").reclaimed
    assert len(running.answer().tokens) == 400
    assert complete(node, "qwen3_5").restored == len(PROMPT) - 1
    assert not node.residents.unload("qwen3_5").reclaimed
    check(node)
    for name, restored in (("llama", 0), ("qwen3_5", len(PROMPT) - 1)):
        node.load_model(str(model_dir(name)))
        assert complete(node, name).restored == restored


def test_it_is_counted_by_its_reason(node, model_dir):
    node.load_model(str(model_dir("llama")))
    reclaiming(node, "llama")
    complete(node, "llama")
    node.residents.unload("llama", force=True)
    assert set(node.volume.cache.stats().total.removed) == {RemovalReason.RECLAIMED}
    check(node)


def test_state_that_another_model_uses_stays_until_that_one_goes(node, model_dir):
    for name in ("one", "other"):
        node.load_model(str(model_dir("llama")), name)
    node.orders.set_namespace("one", Change(reclaim_on_unload=True))
    complete(node, "one")
    assert not node.residents.unload("one").reclaimed
    assert complete(node, "other").restored == len(PROMPT) - 1
    assert node.residents.unload("other").reclaimed
    node.load_model(str(model_dir("llama")))
    assert complete(node, "llama").restored == 0


def test_what_is_pinned_stays(node, model_dir):
    node.load_model(str(model_dir("qwen3_5")))
    reclaiming(node, "qwen3_5")
    pinned = PROMPT + complete(node, "qwen3_5", pin=Pin("night", 3600)).tokens
    complete(node, "qwen3_5", tokens=PROMPT[::-1])
    gone = node.residents.unload("qwen3_5").reclaimed
    assert gone.freed_bytes > 0
    assert gone.kept[KeptReason.PINNED] > 0
    (pin,) = node.volume.cache.administration.pins()
    assert (pin.owner, pin.tokens) == ("night", len(pinned))
    node.load_model(str(model_dir("qwen3_5")))
    assert complete(node, "qwen3_5", tokens=PROMPT[::-1]).restored == 0
    assert complete(node, "qwen3_5", tokens=[*pinned, 1]).restored == len(pinned)
    check(node)


def test_what_was_pinned_is_reclaimed_once_it_is_not(node, model_dir):
    node.load_model(str(model_dir("qwen3_5")))
    reclaiming(node, "qwen3_5")
    complete(node, "qwen3_5", pin=Pin("night", 3600))
    kept = node.residents.unload("qwen3_5").reclaimed.kept
    assert node.orders.gc().nodes == {}
    assert node.orders.release("night")[0] == 1
    freed = node.orders.gc()
    assert freed.nodes == {RemovalReason.RECLAIMED: sum(kept.values())}
    assert freed.nbytes > 0
    assert node.orders.gc().nodes == {}
    check(node)


def test_the_index_knows_what_was_loaded_last(node, model_dir):
    node.load_model(str(model_dir("llama")), "mine")
    (found,) = node.volume.cache.administration.namespaces()
    assert (found.model, found.source) == ("mine", str(model_dir("llama")))
    assert found.loaded > 0


def quotas(home, *names):
    """Quota of the one namespace of a model that is loaded under these names."""
    with Node.open(NodeSettings(home=home, cap_bytes=GIB)) as node:
        at_the_start = [one.settings for one in node.orders.namespaces()]
        for directory, name in names:
            node.load_model(str(directory), name)
        (found,) = node.orders.namespaces()
        for _, name in names:
            assert node.orders.find(name) == found
            assert node.orders.find(f"{name}/default") == found
    before = [one.quota_bytes for one in at_the_start]
    return before, found.settings.quota_bytes


def test_settings_of_a_model_with_two_names_do_not_go_by_the_order_of_loads(
    tmp_path, model_dir
):
    home, directory = tmp_path / "home", model_dir("llama")
    home.mkdir()
    (home / "config.toml").write_text(
        "[namespaces.one]\nquota_bytes = 3\n[namespaces.two]\nquota_bytes = 5\n"
        "[namespaces.zero]\nttl = 9\n"
    )
    one, two, zero = ((directory, name) for name in ("one", "two", "zero"))
    assert quotas(home, one, two, zero) == ([], 3)
    assert quotas(home, zero, two, one) == ([3], 3)
    # The first name of the two decides before it is loaded.
    assert quotas(home, two, one, zero) == ([3], 3)


def test_a_name_that_is_unloaded_says_nothing_any_more(tmp_path, model_dir):
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        "[namespaces.one]\nquota_bytes = 3000000\n[namespaces.two]\nttl = 9\n"
    )
    with Node.open(NodeSettings(home=home, cap_bytes=GIB)) as node:
        for name in ("one", "two"):
            node.load_model(str(model_dir("llama")), name)
        settings = node.orders.find("one").settings
        assert (settings.quota_bytes, settings.ttl) == (3_000_000, 9)
        node.residents.unload("one")
        settings = node.orders.find("two").settings
        assert (settings.quota_bytes, settings.ttl) == (None, 9)
        with pytest.raises(UnknownNamespaceError):
            node.orders.find("one")
        node.residents.unload("two")
        assert node.orders.find("two").settings == settings


def test_what_settings_evict_at_a_load_is_logged_before(tmp_path, model_dir):
    home = tmp_path / "home"
    with Node.open(NodeSettings(home=home, cap_bytes=GIB)) as node:
        node.load_model(str(model_dir("llama")), "two")
        complete(node, "two")
        node.volume.cache.flush()
    (home / "config.toml").write_text("[namespaces.one]\nquota_bytes = 1\n")
    with Node.open(NodeSettings(home=home, cap_bytes=GIB)) as node:
        assert not node.volume.cache.stats().total.removed
        with capture_logs() as logs:
            node.load_model(str(model_dir("llama")), "one")
        (removed,) = node.volume.cache.stats().total.removed.items()
    (planned,) = (log for log in logs if log["event"] == "cache_removal_planned")
    # By the names that `plan` says, of which the last load's is one.
    assert planned["model"] == "one, two"
    assert (planned["reason"], planned["nodes"]) == removed == ("quota", removed[1])
