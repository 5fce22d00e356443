"""An operator's orders over HTTP: real servers, real state, and a walk of the disk."""

import contextlib
import io
import itertools
import json
import time
from collections import Counter

import httpx
import pytest

from kvport.api.admin_bodies import (
    ClearBody,
    NamespaceBody,
    PlanBody,
    ReleaseBody,
    ScrubBody,
)
from kvport.api.problems import ProblemError
from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.policy import Tier
from tests.api.conftest import running
from tests.cache.builder import walk

WORDS = "the tide comes in, and goes out again. "
FIRST = itertools.count(0x410)


def prompt(length: int = 600) -> str:
    """A text of which no server has seen the first character, which is a token."""
    return (chr(next(FIRST)) + WORDS * length)[:length]


@pytest.fixture
def serving(tmp_path, models):
    """A server of one's own on a home that survives it."""

    @contextlib.contextmanager
    def serve(*chosen, **settings):
        with running(tmp_path / "home", *(chosen or models), **settings) as server:
            yield server

    return serve


@pytest.fixture(scope="module")
def shared(tmp_path_factory, models):
    with running(tmp_path_factory.mktemp("operated"), *models) as running_server:
        yield running_server


@pytest.fixture
def server(shared):
    """A server of two models, with nothing stored, and nothing set."""
    yield shared
    clear(shared, all=True, force=True)
    for one in namespaces(shared):
        nothing = dict.fromkeys(one["settings"])
        change(shared, one["id"], **nothing)


def compute(server, model: str, text: str | None = None) -> str:
    """Compute a prompt, and have all of it stored."""
    text = text or prompt()
    server.client.complete(model, prompt=text, max_tokens=4, temperature=0)
    server.client.probe(model, prompt=text)
    return text


def restorable(server, model: str, text: str) -> int:
    return server.client.probe(model, prompt=text).restorable_tokens


def namespaces(server) -> list[dict]:
    return server.client.admin.namespaces()["namespaces"]


def namespace(server, model: str) -> dict:
    (found,) = (one for one in namespaces(server) if model in one["names"])
    return found


def namespace_numbers(server, model: str) -> dict:
    found = server.client.stats()["cache"]["namespaces"]
    return next(one for one in found if one["model"] == model)


def removed(server) -> Counter:
    """Segments that went since the start, by reason."""
    return Counter(server.client.stats()["cache"]["total"]["removed"])


def change(server, which: str, **fields) -> dict:
    return server.client.admin.set_namespace(NamespaceBody(namespace=which, **fields))


def clear(server, **filters) -> dict:
    return server.client.admin.clear(ClearBody(**filters))


def refusal(call, *arguments, **fields) -> tuple[int, str]:
    with pytest.raises(ProblemError) as caught:
        call(*arguments, **fields)
    return caught.value.status, caught.value.code


def total(server) -> int:
    """Bytes that the account says, which the disk must agree with."""
    found = server.client.stats()["total_bytes"]
    assert found == walk(server.home / "cache")
    return found


# Namespaces.


def test_namespaces_say_what_each_holds_and_what_is_set(server):
    compute(server, "llama")
    llama, hybrid = namespace(server, "llama"), namespace(server, "qwen3_5")
    assert llama["bytes"] > 0 == hybrid["bytes"]
    assert llama["kinds"].keys() == {"kv"}
    assert llama["kinds"]["kv"]["bytes"] == llama["bytes"]
    (of_stats,) = (
        one
        for one in server.client.stats()["cache"]["namespaces"]
        if one["id"] == llama["id"]
    )
    assert of_stats["bytes"] == llama["bytes"]
    assert of_stats["last_loaded"] == llama["last_loaded"]
    assert llama["incompatible"] is None
    assert llama["settings"] == {
        "quota_bytes": None, "ttl": None, "tier": "on", "retention": None,
        "reclaim_on_unload": False, "write_bytes_per_hour": None,
    }  # fmt: skip


def test_a_namespace_goes_by_id_prefix_model_and_scope(server):
    ident = namespace(server, "llama")["id"]
    names = (ident, ident[:8], ident[:8].upper(), "llama", "llama/default")
    for seconds, which in enumerate(names, 100):
        one = change(server, which, ttl=seconds)
        assert (one["id"], one["settings"]["ttl"]) == (ident, seconds)
    assert namespace(server, "qwen3_5")["settings"]["ttl"] is None
    for which in (ident[:7], "llam", "llama/", "llama/team", "", "/default"):
        status, code = refusal(change, server, which, ttl=1)
        assert (status, code) in {(404, "unknown_namespace"), (400, "bad_request")}


def test_a_name_that_several_namespaces_have_is_ambiguous(serving, models):
    llama, _ = models
    with serving(llama, block_size=256) as server:
        first = namespace(server, "llama")["id"]
    with serving(llama, block_size=512) as server:
        assert refusal(change, server, "llama", ttl=9) == (409, "ambiguous_namespace")
        assert change(server, first, ttl=9)["settings"]["ttl"] == 9
        assert len(server.client.admin.namespaces()["namespaces"]) == 2


def test_what_is_set_holds_at_once_survives_a_restart_and_is_taken_back(
    serving, models
):
    llama, _ = models
    with serving(llama) as server:
        (server.home / "config.toml").write_text(
            '[namespaces.default]\nttl = "30d"\nquota_bytes = "1GiB"\n'
            '[namespaces.llama]\nttl = "7d"\n'
        )
        assert namespace(server, "llama")["settings"]["ttl"] is None
        assert change(server, "llama", ttl=60)["settings"]["ttl"] == 60
    with serving(llama) as server:
        settings = namespace(server, "llama")["settings"]
        assert (settings["ttl"], settings["quota_bytes"]) == (60, 1 << 30)
        settings = change(server, "llama", ttl=None)["settings"]
        assert (settings["ttl"], settings["quota_bytes"]) == (7 * 86_400, 1 << 30)


def test_a_model_under_two_names_goes_by_each_of_them(server, models):
    llama, _ = models
    server.node.load_model(str(llama), "again")
    try:
        ident = namespace(server, "llama")["id"]
        assert namespace(server, "again")["id"] == ident
        for seconds, which in enumerate(("again", "llama", "again/default"), 100):
            one = change(server, which, ttl=seconds)
            assert (one["id"], one["settings"]["ttl"]) == (ident, seconds)
        (of_stats,) = (
            one
            for one in server.client.stats()["cache"]["namespaces"]
            if one["id"] == ident
        )
        assert of_stats["model"] == one["model"] == "again, llama"
        assert one["origins"] == {"ttl": "command"}
        compute(server, "llama")
        plan = server.client.admin.plan(PlanBody(quotas={"again": 4096}))
        assert {row["model"] for row in plan["rows"]} == {"again, llama"}
    finally:
        server.node.residents.unload("again")
    assert refusal(change, server, "again", ttl=1) == (404, "unknown_namespace")


def test_a_ttl_removes_at_once_and_says_what(server):
    compute(server, "llama")
    held = namespace(server, "llama")["bytes"]
    time.sleep(2.1)
    answer = change(server, "llama", ttl=1)
    assert answer["freed_bytes"] == held > 0
    assert answer["removed"].keys() == {"expired"}
    assert namespace(server, "llama")["bytes"] == 0


def test_a_read_only_namespace_restores_and_takes_nothing(server):
    stored = compute(server, "llama")
    change(server, "llama", tier=Tier.READ_ONLY)
    before = total(server)
    new = prompt()
    server.client.complete("llama", prompt=new, max_tokens=4)
    assert restorable(server, "llama", new) == 0
    refused = refusal(server.client.export, "llama", io.BytesIO(), prompt=new)
    assert refused == (409, "namespace_tier")
    assert total(server) == before
    again = server.client.complete("llama", prompt=stored, max_tokens=4)
    assert again.cached_tokens == len(stored) - 1


def test_an_off_namespace_neither_restores_nor_takes_and_keeps_what_it_has(server):
    stored = compute(server, "llama")
    change(server, "llama", tier=Tier.OFF)
    before = total(server)
    skipped = namespace_numbers(server, "llama")["skipped"].get("tier", 0)
    for text in (stored, prompt()):
        answer = server.client.complete("llama", prompt=text, max_tokens=4)
        assert answer.cached_tokens == 0
        refused = refusal(server.client.export, "llama", io.BytesIO(), prompt=text)
        assert refused == (409, "namespace_tier")
    assert total(server) == before
    assert namespace_numbers(server, "llama")["skipped"]["tier"] == skipped + 2
    server.client.complete("llama", prompt=prompt(), max_tokens=4, write=False)
    assert namespace_numbers(server, "llama")["skipped"]["tier"] == skipped + 2
    (model,) = (one for one in server.client.models() if one.name == "llama")
    assert (model.cached, model.state) == (True, "off")
    change(server, "llama", tier=None)
    assert restorable(server, "llama", stored) == len(stored) - 1


# Plan, gc.


def test_a_plan_is_what_a_quota_then_removes(server):
    texts = [compute(server, "llama") for _ in range(4)]
    other = compute(server, "qwen3_5")
    held = namespace(server, "llama")["bytes"]
    before = removed(server)
    quota = held // 2
    plan = server.client.admin.plan(PlanBody(quotas={"llama": quota}))
    assert namespace(server, "llama")["bytes"] == held, "a plan removes nothing"
    assert [row["reason"] for row in plan["rows"]] == ["quota"]
    assert plan["bytes"] == sum(row["bytes"] for row in plan["rows"]) > 0
    assert plan["missing_bytes"] == 0

    answer = change(server, "llama", quota_bytes=quota)
    assert answer["freed_bytes"] == plan["bytes"]
    assert answer["removed"] == {"quota": plan["segments"]}
    left = namespace(server, "llama")["bytes"]
    assert held - left == plan["bytes"]
    assert left <= quota
    assert removed(server) - before == {"quota": plan["segments"]}
    assert restorable(server, "llama", texts[-1]) == len(texts[-1]) - 1
    assert restorable(server, "qwen3_5", other) > 0
    total(server)


def test_a_plan_for_a_cap_is_what_a_start_with_it_removes(serving, models):
    llama, _ = models
    with serving(llama) as server:
        for _ in range(8):
            compute(server, "llama", prompt(2000))
        cap = total(server) * 3 // 4
        assert cap > 4 << 20, "the smallest cap there is"
        plan = server.client.admin.plan(PlanBody(cap_bytes=cap))
        assert plan["rows"]
        held = sum(one["bytes"] for one in namespaces(server))
    with serving(llama, cap_bytes=cap) as server:
        left = sum(one["bytes"] for one in namespaces(server))
        assert held - left == plan["bytes"]
        assert total(server) <= cap
        assert removed(server).total() == plan["segments"]


def test_b86_gc_removes_what_has_expired_and_says_how_much(server):
    text = compute(server, "llama")
    kept = compute(server, "qwen3_5")
    held = namespace(server, "llama")["bytes"]
    assert server.client.admin.gc() == {"freed_bytes": 0, "removed": {}}
    change(server, "llama", ttl=1)
    time.sleep(2.1)
    assert restorable(server, "llama", text) == 0
    freed = server.client.admin.gc()
    # Maintenance may have been first.
    assert freed["freed_bytes"] in {0, held}
    assert namespace(server, "llama")["bytes"] == 0
    assert restorable(server, "qwen3_5", kept) > 0
    total(server)


def test_a_floor_above_what_is_free_is_said_everywhere(serving, models):
    with serving(models[0], free_floor=1 << 60) as server:
        stats = server.client.stats()
        assert stats["used_percent"] == 100
        assert stats["effective_cap_bytes"] == 0 < stats["cap_bytes"]
        assert stats["volume"]["state"] == "full"
        assert "floor" in stats["volume"]["reason"]
        with server.http() as http:
            assert http.get("/healthz").json()["cache"] == "full"


# Clear.


def test_clearing_all_must_be_said(server):
    with server.http() as http:
        for body in ({}, {"all": False}, {"force": True}, {"all": True, "kind": "kv"}):
            answer = http.post("/api/cache/clear", json=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_b71_clear_counts_what_it_frees_and_lookups_miss_afterwards(server):
    texts = {model: compute(server, model) for model in ("llama", "qwen3_5")}
    held = sum(one["bytes"] for one in namespaces(server))
    cleared = clear(server, all=True)
    assert cleared["freed_bytes"] == held > 0
    assert cleared["removed_segments"] > 0
    assert cleared["kept"] == {"leased": 0, "pinned": 0, "shared": 0}
    for model, text in texts.items():
        assert restorable(server, model, text) == 0
    assert all(one["bytes"] == 0 for one in namespaces(server))
    assert server.client.stats()["cache"]["account"]["blobs"] == 0
    total(server)


def test_clear_of_a_namespace_leaves_the_others(server):
    texts = {model: compute(server, model) for model in ("llama", "qwen3_5")}
    held = namespace(server, "llama")["bytes"]
    assert clear(server, namespace="llama")["freed_bytes"] == held
    assert restorable(server, "llama", texts["llama"]) == 0
    assert restorable(server, "qwen3_5", texts["qwen3_5"]) > 0
    total(server)


def test_clear_of_a_kind_leaves_the_others(server):
    texts = {model: compute(server, model) for model in ("llama", "qwen3_5")}
    before = namespace(server, "qwen3_5")["kinds"]
    pruned = server.client.stats()["cache"]["total"]["pruned"]
    cleared = clear(server, kind=BlobClass.STATE)
    counted = server.client.stats()["cache"]["total"]
    assert counted["pruned"] == pruned
    assert counted["cleared"]["state"] == {
        "blobs": cleared["dropped_blobs"],
        "bytes": cleared["freed_bytes"],
    }
    assert cleared["freed_bytes"] == before["state"]["bytes"] > 0
    assert cleared["dropped_blobs"] > 0
    after = namespace(server, "qwen3_5")["kinds"]
    assert after == {"kv": before["kv"]}
    assert restorable(server, "qwen3_5", texts["qwen3_5"]) == 0
    assert restorable(server, "llama", texts["llama"]) == len(texts["llama"]) - 1
    total(server)


def test_clear_by_age_leaves_what_was_used_since(server):
    old, used, new = (compute(server, "llama") for _ in range(3))
    time.sleep(2.1)
    server.client.complete("llama", prompt=used, max_tokens=4)
    assert restorable(server, "llama", new) > 0, "a probe is a use"
    assert clear(server, older_than=3600)["removed_segments"] == 0
    assert clear(server, older_than=2)["removed_segments"] > 0
    assert restorable(server, "llama", old) == 0
    assert restorable(server, "llama", used) > 0
    total(server)


def test_clear_of_an_artifact_leaves_what_hangs_on_its_path(server, tmp_path):
    alone = compute(server, "llama")
    server.client.export("llama", tmp_path / "alone", prompt=alone)
    clear(server, all=True)
    admitted = server.client.import_(tmp_path / "alone", model="llama").artifact_id
    stem = compute(server, "llama")
    longer = compute(server, "llama", stem + "and then there was another one")
    on_stem = server.client.keep("llama", prompt=stem).artifact_id
    clear(server, artifact=on_stem)
    assert restorable(server, "llama", longer) == len(longer) - 1
    assert restorable(server, "llama", alone) > 0
    assert clear(server, artifact=admitted)["removed_segments"] > 0
    assert restorable(server, "llama", alone) == 0
    assert restorable(server, "llama", longer) == len(longer) - 1
    unknown = "blake3:" + "0" * 64
    assert refusal(clear, server, artifact=unknown) == (404, "artifact_unknown")
    total(server)


def test_what_was_cleared_does_not_come_back_from_memory(server):
    text = prompt()
    answer = server.client.complete("llama", prompt=text, max_tokens=4, temperature=0)
    # The reply's end waits in memory for the next turn, and hangs on the prompt.
    cleared = clear(server, namespace="llama")
    assert cleared["removed_segments"] > 0
    assert cleared["kept"] == {"leased": 0, "pinned": 0, "shared": 0}
    assert restorable(server, "llama", text) == 0
    assert namespace(server, "llama")["bytes"] == 0
    turn = text + answer.text + " and then?"
    assert server.client.complete("llama", prompt=turn, max_tokens=4).cached_tokens == 0


# Holds.


def test_b72_clear_passes_by_what_is_pinned_and_owners_end_only_their_own(server):
    text = compute(server, "llama")
    loose = compute(server, "llama")
    cache = server.node.volume.cache
    model = server.node.engine.store("llama").namespace
    artifact = server.client.keep("llama", prompt=text).artifact_id
    (record,) = [r for r in server.node.ledger.artifacts() if r.id == artifact]
    for owner in ("alice", "bob"):
        cache.administration.pin(model.id, record.tip, owner, 600)
    found = server.client.admin.pins()
    assert [pin["owner"] for pin in found["pins"]] == ["alice", "bob"]
    assert all(590 < pin["seconds_left"] <= 600 for pin in found["pins"])
    assert found["pins"][0]["tokens"] >= len(text) - 1

    assert clear(server, all=True)["kept"]["pinned"] > 0
    assert restorable(server, "llama", text) > 0
    assert restorable(server, "llama", loose) == 0

    release = server.client.admin.release
    nothing = {"released": 0, "freed_bytes": 0, "removed": {}}
    node = found["pins"][0]["node"]
    assert release(ReleaseBody(owner="carol")) == nothing
    assert release(ReleaseBody(owner="alice", node="00" * 32)) == nothing
    ended = release(ReleaseBody(owner="alice", node=node[:8]))
    assert ended == {**nothing, "released": 1}
    assert [pin["owner"] for pin in server.client.admin.pins()["pins"]] == ["bob"]
    assert clear(server, all=True)["kept"]["pinned"] > 0
    assert clear(server, all=True, force=True)["kept"]["pinned"] == 0
    assert restorable(server, "llama", text) == 0
    assert server.client.admin.pins()["pins"] == []


# Scrub.


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_says_what_is_pinned_and_what_is_not(server, stream):
    """All of it; nothing, as the budget is spent; and refused, as the tier is off."""

    def ask() -> dict:
        body = {
            "model": "qwen3_5",
            "prompt": prompt(),
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": stream,
            "cache": {"pin": {"owner": "zed", "seconds": 300}},
        }
        with server.http() as http:
            answer = http.post("/v1/completions", json=body)
        if not stream:
            return answer.json()["cache"]
        lines = [one for one in answer.text.split("\n") if '"cache"' in one]
        return json.loads(lines[-1].removeprefix("data: "))["cache"]

    said = ask()
    (pin,) = server.client.admin.pins()["pins"]
    assert said == {
        "pinned_tokens": 604,
        "pinned_until": pin["until"],
        "unpinned_reason": None,
    }
    assert pin["tokens"] == 604
    change(server, "qwen3_5", write_bytes_per_hour=1)
    assert ask() == {
        "pinned_tokens": 0,
        "pinned_until": None,
        "unpinned_reason": "write_budget",
    }
    for tier in (Tier.READ_ONLY, Tier.OFF):
        change(server, "qwen3_5", tier=tier)
        wish = {"owner": "zed", "seconds": 300}
        refused = refusal(
            server.client.complete, "qwen3_5", prompt=prompt(), max_tokens=4, pin=wish
        )
        assert refused == (409, "namespace_tier")


def test_a_scrub_finds_damage_before_a_request_does(server):
    text = compute(server, "llama")
    compute(server, "qwen3_5")
    files = [p for p in (server.home / "cache").rglob("*") if len(p.name) == 64]
    blobs = sorted(path for path in files if path.is_file())
    llama = namespace(server, "llama")["id"]
    for victim in (path for path in blobs if llama in str(path)):
        data = bytearray(victim.read_bytes())
        data[0] ^= 1
        victim.write_bytes(data)
    admin = server.client.admin
    assert admin.scrub()["running"] is False
    admin.start_scrub(ScrubBody(bytes_per_second=None))
    found = wait_for(admin.scrub, lambda it: not it["running"])
    # What hangs on a damaged segment goes with it, and is not read any more.
    assert 1 <= found["damaged"] <= found["checked"] <= len(blobs)
    assert found["completed"] is not None
    assert restorable(server, "llama", text) == 0
    assert removed(server)["damaged"] > 0


def test_a_scrub_is_slow_can_be_stopped_and_takes_a_new_rate(server):
    compute(server, "llama")
    admin = server.client.admin
    before = admin.scrub()["completed"]
    assert admin.start_scrub(ScrubBody(bytes_per_second=1))["running"]
    stopped = admin.stop_scrub()
    assert not stopped["running"]
    assert stopped["completed"] == before
    assert admin.start_scrub(ScrubBody(bytes_per_second=1))["running"]
    admin.start_scrub(ScrubBody(bytes_per_second=None))
    found = wait_for(admin.scrub, lambda it: not it["running"])
    assert found["completed"] >= (before or "2")
    assert found["checked"] > 0
    assert found["damaged"] == 0


def wait_for(read, done, seconds: float = 20):
    end = time.monotonic() + seconds
    while not done(found := read()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_server_that_stops_ends_its_scrub(serving, models):
    with serving(models[0]) as server:
        compute(server, "llama")
        admin = server.client.admin
        assert admin.start_scrub(ScrubBody(bytes_per_second=1))["running"]


# Form.


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "namespaces", {}),
        ("PUT", "namespaces", {"namespace": "llama", "quota": 5}),
        ("PUT", "namespaces", {"namespace": "llama", "quota_bytes": "5"}),
        ("PUT", "namespaces", {"namespace": "llama", "quota_bytes": 0}),
        ("PUT", "namespaces", {"namespace": "llama", "ttl": 1.5}),
        ("PUT", "namespaces", {"namespace": "llama", "tier": "maybe"}),
        ("PUT", "namespaces", {"namespace": "llama", "retention": {"newest": 0}}),
        ("POST", "plan", {"cap": 5}),
        ("POST", "plan", {"cap_bytes": -1}),
        ("POST", "plan", {"quotas": {"llama": "1"}}),
        ("POST", "gc", {"dry_run": True}),
        ("POST", "purge", {"keys": []}),
        ("POST", "clear", {"kind": "rows"}),
        ("POST", "clear", {"older_than": 0}),
        ("POST", "clear", {"artifact": "../../etc"}),
        ("POST", "clear", {"artifact": "blake3:" + "0" * 64, "kind": "kv"}),
        ("POST", "clear", {"all": 1}),
        ("POST", "pins/release", {}),
        ("POST", "pins/release", {"owner": ""}),
        ("POST", "pins/release", {"owner": "alice", "node": "%"}),
        ("POST", "scrub", {"bytes_per_second": 0}),
        ("POST", "scrub", {"rate": 1}),
    ],
)
def test_what_is_not_of_the_form_is_refused_by_name(origin, method, path, body):
    with origin.http() as http:
        answer = http.request(method, f"/api/cache/{path}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_schema_describes_every_order(origin):
    with origin.http() as http:
        paths = http.get("/schema").json()["paths"]
    for path, methods in {
        "namespaces": {"get", "put"},
        "plan": {"post"},
        "gc": {"post"},
        "clear": {"post"},
        "purge": {"post"},
        "pins": {"get"},
        "pins/release": {"post"},
        "scrub": {"get", "post", "delete"},
    }.items():
        assert methods <= paths[f"/api/cache/{path}"].keys()
    body = paths["/api/cache/namespaces"]["put"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert {"namespace", "quota_bytes", "ttl", "tier", "retention"} <= fields.keys()


def test_orders_want_the_key(origin):
    for path in ("namespaces", "pins", "scrub"):
        assert httpx.get(f"{origin.url}/api/cache/{path}").status_code == 401
    for path in ("clear", "purge"):
        assert httpx.post(f"{origin.url}/api/cache/{path}").status_code == 401


# Unloading.


def test_b19_b36_an_unloaded_model_gives_back_its_own_state_where_that_is_set(
    serving, models
):
    with serving() as server:
        texts = {name: compute(server, name) for name in ("llama", "qwen3_5")}
        change(server, "qwen3_5", reclaim_on_unload=True)
        assert not server.node.residents.unload("llama").reclaimed
        assert server.node.residents.unload("qwen3_5").reclaimed
        assert namespace(server, "llama")["bytes"] > 0
        assert namespace(server, "qwen3_5")["bytes"] == 0
        total(server)
        server.node.load_model(str(models[0]))
        assert restorable(server, "llama", texts["llama"]) > 0


def test_b21_clear_works_while_no_model_is_loaded(serving):
    with serving() as server:
        for name in ("llama", "qwen3_5"):
            compute(server, name)
            server.node.residents.unload(name)
        held = sum(one["bytes"] for one in namespaces(server))
        assert clear(server, all=True)["freed_bytes"] == held > 0
        assert server.client.stats()["cache"]["account"]["blobs"] == 0
        total(server)
