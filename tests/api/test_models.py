"""Models are loaded and unloaded over HTTP while others are served."""

import threading
import time
from pathlib import Path

import pytest

from kvport.api.problems import ProblemError
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.errors import EngineStoppedError
from tests.api.conftest import running

TALK = "a question of some length " * 20


@pytest.fixture
def server(tmp_path, models):
    with running(tmp_path / "home", models[0]) as found:
        yield found


def refusal(call) -> tuple[int, str]:
    with pytest.raises(ProblemError) as refused:
        call()
    return refused.value.status, refused.value.code


def names(server) -> list[str]:
    return [model.name for model in server.client.models()]


def test_a_server_may_start_without_a_model(tmp_path, models):
    with running(tmp_path / "home") as server:
        assert names(server) == []
        loaded = server.client.load_model(str(models[0]))
        assert (loaded.name, loaded.cached, loaded.keep_alive) == ("llama", True, None)
        assert names(server) == ["llama"]
        assert server.client.complete("llama", prompt=TALK, max_tokens=2).tokens


def test_a_model_comes_and_goes_and_its_state_stays(server, models):
    client = server.client
    client.load_model(str(models[1]), name="other")
    first = client.complete("other", prompt=TALK, max_tokens=4)
    gone = client.unload_model("other")
    assert gone.model == "other"
    assert gone.weight_bytes > 10_000
    assert not gone.reclaimed
    with pytest.raises(ProblemError) as refused:
        client.complete("other", prompt=TALK)
    assert (refused.value.status, refused.value.code) == (410, "model_unloaded")
    assert "was unloaded at" in refused.value.message
    assert f"kvport models load {models[1]} --name other" in refused.value.message
    unload = refusal(lambda: client.unload_model("other"))
    assert unload == (410, "model_unloaded")
    assert refusal(lambda: client.unload_model("never")) == (404, "unknown_model")
    [known] = client.unloaded_models()
    assert (known.name, known.source) == ("other", str(models[1]))
    assert known.idle_seconds is None
    client.load_model(str(models[1]), name="again")
    again = client.complete("again", prompt=TALK, max_tokens=4)
    assert again.cached_tokens == first.prompt_tokens - 1
    assert again.tokens == first.tokens


def test_the_same_model_again_changes_how_long_it_is_kept_and_nothing_else(
    server, models
):
    client, path = server.client, str(models[0])
    module = server.node.engine.model("llama").module
    assert client.load_model(path, keep_alive=3600).keep_alive == 3600
    assert client.load_model(path).keep_alive == 3600
    assert client.load_model(path, keep_alive=None).keep_alive is None
    assert server.node.engine.model("llama").module is module


def test_a_name_that_is_taken_is_refused(server, models):
    client = server.client
    for call in (
        lambda: client.load_model(str(models[1]), name="llama"),
        lambda: client.load_model(str(models[0]), points={"forks": 9}),
        lambda: client.load_model(str(models[0]), draft="lookup"),
    ):
        assert refusal(call) == (409, "model_loaded")
    assert names(server) == ["llama"]


def test_points_and_drafts_are_those_that_were_asked_for(server, models):
    points = {"stride": 512, "prompts": 3}
    loaded = server.client.load_model(
        str(models[1]), name="own", points=points, draft="lookup", draft_tokens=5
    )
    assert loaded.drafted
    tuning = server.node.engine.served["own"].tuning
    usual = server.node.settings.tuning
    assert (tuning.stride, tuning.chunk) == (512, usual.chunk)
    assert tuning.retention.prompts == 3
    assert tuning.retention.replies == usual.retention.replies
    assert tuning.draft == DraftSource(tokens=5)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "bad_request"),
        ({"model": ""}, 400, "bad_request"),
        ({"model": "x", "name": "two words"}, 400, "bad_request"),
        ({"model": "x", "name": ""}, 400, "bad_request"),
        ({"model": "x", "keep_alive": 0}, 400, "bad_request"),
        ({"model": "x", "keep_alive": 1.5}, 400, "bad_request"),
        ({"model": "x", "keep_alive": 315_360_001}, 400, "bad_request"),
        ({"model": "x", "points": {"forks": 0}}, 400, "bad_request"),
        ({"model": "x", "points": {"fork": 1}}, 400, "bad_request"),
        ({"model": "x", "points": {"stride": 100}}, 400, "bad_request"),
        ({"model": "x", "draft": "/no/such/directory"}, 400, "bad_request"),
        ({"model": "x", "draft": "a" * 600}, 400, "bad_request"),
        ({"model": "x", "draft": "a\0b"}, 400, "bad_request"),
        ({"model": "x", "draft": "~nobody-of-that-name/a"}, 400, "bad_request"),
        ({"model": "x", "draft_tokens": 4}, 400, "bad_request"),
        ({"model": "x", "draft": "lookup", "draft_tokens": 65}, 400, "bad_request"),
        ({"model": "/no/such/directory"}, 422, "model_load"),
        ({"model": "a" * 600}, 422, "model_load"),
        ({"model": "a\0b"}, 422, "model_load"),
        ({"model": "~nobody-of-that-name/a"}, 422, "model_load"),
        ({"model": str(Path(__file__).parent), "name": "x"}, 422, "model_load"),
    ],
)
def test_what_cannot_be_loaded_is_refused(origin, body, status, code):
    before = names(origin)
    with origin.http() as http:
        answer = http.post("/v1/models/load", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert names(origin) == before


def test_by_force_a_stream_ends_with_the_reason(server):
    stream = server.client.stream("llama", prompt=TALK, max_tokens=100_000)
    next(stream)
    server.client.unload_model("llama", force=True)
    with pytest.raises(ProblemError) as ended:
        list(stream)
    assert ended.value.code == "model_unloaded"


def test_without_force_replies_are_waited_for(server):
    stream = server.client.stream("llama", prompt=TALK, max_tokens=300)
    next(stream)
    done = []
    waiting = threading.Thread(
        target=lambda: done.append(server.client.unload_model("llama"))
    )
    waiting.start()
    assert sum(len(delta.tokens) for delta in stream) > 250
    waiting.join(60)
    assert [gone.model for gone in done] == ["llama"]


def test_a_model_that_nobody_uses_goes_by_itself(server, models):
    server.client.load_model(str(models[1]), name="brief", keep_alive=1)
    assert server.client.complete("brief", prompt=TALK, max_tokens=2).tokens
    deadline = time.monotonic() + 60
    while "brief" in names(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names(server) == ["llama"]
    [known] = server.client.unloaded_models()
    assert (known.name, known.idle_seconds) == ("brief", 1)
    with pytest.raises(ProblemError, match="after 1 s without a request") as refused:
        server.client.complete("brief", prompt=TALK)
    assert refused.value.code == "model_unloaded"
    server.client.load_model(known.source, name="brief")
    assert server.client.unloaded_models() == ()


def test_a_server_ends_although_an_unload_waits(tmp_path, models):
    with running(tmp_path / "home", models[0]) as server:
        stream = server.client.stream("llama", prompt=TALK, max_tokens=100_000)
        next(stream)
        unloading = server.node.residents.start_unload("llama")
        while names(server):
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert isinstance(unloading.exception(30), EngineStoppedError | type(None))
