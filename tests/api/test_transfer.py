"""Artifacts over HTTP: out, in, kept, refused, broken off."""

import io
import itertools
import threading
from contextlib import ExitStack
from functools import partial

import pytest

from kvport.api.errors import IncompleteError
from kvport.api.problems import ProblemError
from kvport.api.routes_cache import IMPORTS
from tests.api import raw
from tests.api.conftest import Running, running, trust

ARTIFACT = "application/vnd.kvport.artifact+tar"
_numbers = itertools.count()


def new_prompt(length: int = 700) -> list[int]:
    """Token ids that no other test uses."""
    seed = next(_numbers)
    return [1 + (seed * 7919 + i * i * 31 + i) % 250 for i in range(length)]


@pytest.fixture(params=["llama", "qwen3_5"])
def model(request) -> str:
    return request.param


def computed(server: Running, model: str = "llama") -> list[int]:
    tokens = new_prompt()
    server.client.complete(model, tokens=tokens, max_tokens=1, ignore_eos=True)
    return tokens


def exported(server: Running, model: str = "llama") -> bytes:
    file = io.BytesIO()
    server.client.export(model, file, tokens=computed(server, model))
    return file.getvalue()


def refused(server: Running, data: bytes) -> ProblemError:
    """The refusal of an import, after which the server is as before."""
    before = held(server)
    with pytest.raises(ProblemError) as refusal:
        server.client.import_(io.BytesIO(data))
    assert held(server) == before
    return refusal.value


def held(server: Running):
    """The account, and artifacts.

    Without what others leave free on the volume, and without the index itself, which
    writes down when it likes what was used last.
    """
    account = server.client.stats()["cache"]["account"]
    del account["free"], account["index"]
    return account, server.client.artifacts()


def test_an_export_announces_what_it_is(origin, model):
    tokens = computed(origin, model)
    with origin.http() as http:
        body = {"model": model, "tokens": tokens}
        answer = http.post("/api/cache/export", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ARTIFACT
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["kvport-artifact"].startswith("blake3:")
    restorable = int(answer.headers["kvport-restorable-tokens"])
    assert restorable in {len(tokens) - 1, len(tokens)}
    assert int(answer.headers["kvport-prompt-tokens"]) == len(tokens)


def test_a_kept_export_is_described_and_can_be_fetched_again(origin, model, tmp_path):
    tokens = computed(origin, model)
    kept = origin.client.keep(model, tokens=tokens)
    assert (kept.format_version, kept.model) == (1, model)
    assert kept.prompt_tokens == len(tokens)
    assert kept.engine_version.startswith("mlx-lm ")
    assert kept.prefix_digest.startswith("blake3:")
    with origin.http(accept=ARTIFACT) as http:
        once, again = http.get(kept.url), http.get(kept.url)
    assert once.content == again.content
    assert len(once.content) == kept.size_bytes

    info = origin.client.download(kept.artifact_id, tmp_path / "it")
    assert info.artifact_id == kept.artifact_id
    assert (tmp_path / "it").read_bytes() == once.content

    facts = origin.client.artifact(kept.artifact_id)
    assert facts in origin.client.artifacts()
    assert (facts.direction, facts.stored) == ("exported", True)
    assert facts.restorable_tokens == kept.restorable_tokens


def test_a_compressed_export_is_smaller_and_restores_the_same(
    origin, destination, model, tmp_path
):
    tokens = computed(origin, model)
    plain, small = tmp_path / "plain", tmp_path / "small"
    origin.client.export(model, plain, tokens=tokens)
    info = origin.client.export(model, small, tokens=tokens, compress=True)
    assert info.size_bytes == small.stat().st_size < plain.stat().st_size
    there = destination.client.import_(small)
    assert there.restored_tokens == info.restorable_tokens
    again = destination.client.import_(plain)
    assert (again.admitted_segments, again.restored_tokens) == (
        0,
        there.restored_tokens,
    )

    kept = origin.client.keep(model, tokens=tokens, compress=True)
    for name in ("one", "two"):
        origin.client.download(kept.artifact_id, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").stat().st_size == kept.size_bytes


def test_an_unknown_artifact_is_not_found(origin):
    for accept in ("application/json", ARTIFACT):
        with origin.http(accept=accept) as http:
            answer = http.get(f"/api/cache/artifacts/blake3:{'0' * 64}")
        assert (answer.status_code, answer.json()["code"]) == (404, "artifact_unknown")


def test_a_kept_export_whose_state_went_is_gone(tmp_path, model_dir):
    with running(tmp_path / "home", model_dir("llama"), cap_bytes=5 << 20) as server:
        tokens = computed(server)
        kept = server.client.keep("llama", tokens=tokens)
        for _ in range(10):
            computed(server)
        for accept in ("application/json", ARTIFACT):
            with server.http(accept=accept) as http:
                answer = http.get(f"/api/cache/artifacts/{kept.artifact_id}")
            assert (answer.status_code, answer.json()["code"]) == (410, "artifact_gone")
        assert not server.client.artifacts()[0].stored
        with pytest.raises(ProblemError) as nothing:
            server.client.export("llama", io.BytesIO(), tokens=tokens)
    assert (nothing.value.code, nothing.value.status) == ("evicted", 409)


def test_what_was_never_computed_is_a_conflict(origin):
    with pytest.raises(ProblemError) as nothing:
        origin.client.export("llama", io.BytesIO(), tokens=[300, *new_prompt()])
    assert (nothing.value.code, nothing.value.status) == ("never_computed", 409)


def test_an_export_says_how_much_of_the_prompt_it_holds(origin):
    tokens = computed(origin)
    longer = [*tokens, *new_prompt(50)]
    info = origin.client.export("llama", io.BytesIO(), tokens=longer)
    assert (info.restorable_tokens, info.prompt_tokens) == (700, 750)
    enough = origin.client.export(
        "llama", io.BytesIO(), tokens=longer, min_tokens=info.restorable_tokens
    )
    assert enough.restorable_tokens == info.restorable_tokens


@pytest.mark.parametrize("kept", [False, True])
def test_less_than_the_least_is_not_exported(origin, tmp_path, kept):
    longer = [*computed(origin), *new_prompt(50)]
    before = origin.client.artifacts()
    file = tmp_path / "it.kvport"
    keep, export = origin.client.keep, partial(origin.client.export, to=file)
    with pytest.raises(ProblemError) as refusal:
        (keep if kept else export)("llama", tokens=longer, min_tokens=701)
    assert (refusal.value.code, refusal.value.status) == ("not_restorable", 409)
    assert refusal.value.message == (
        "only 700 of 750 prompt tokens are restorable, fewer than min_tokens"
    )
    assert not list(tmp_path.iterdir())
    assert origin.client.artifacts() == before
    assert origin.client.stats()["cache"]["leases"] == 0


def test_without_a_cache_there_is_nothing_to_export(tmp_path, model_dir):
    with running(tmp_path / "home", model_dir("llama"), cache_enabled=False) as server:
        tokens = computed(server)
        with pytest.raises(ProblemError) as nothing:
            server.client.export("llama", io.BytesIO(), tokens=tokens)
    assert (nothing.value.code, nothing.value.status) == ("cache_off", 409)


def test_a_finished_conversation_is_exported_to_its_end(origin, destination):
    talk = [{"role": "user", "content": "Tell me of pears, at some length, please."}]
    reply = origin.client.complete(
        "llama", messages=talk, max_tokens=20, ignore_eos=True
    )
    file = io.BytesIO()
    open_talk = origin.client.export("llama", file, messages=talk)
    assert open_talk.restorable_tokens == reply.prompt_tokens
    talk.append({"role": "assistant", "content": reply.text})
    closed = origin.client.probe("llama", messages=talk)
    assert closed.prompt_tokens > reply.prompt_tokens
    export = origin.client.export("llama", io.BytesIO(), messages=talk)
    assert export.restorable_tokens == reply.prompt_tokens + 20


def test_probing_tells_what_is_stored(origin, model):
    tokens = computed(origin, model)
    found = origin.client.probe(model, tokens=tokens)
    assert found.prompt_tokens == len(tokens)
    assert found.restorable_tokens == len(tokens) - 1
    assert found.stored_tokens >= found.restorable_tokens
    exact = origin.client.probe(model, tokens=tokens, policy="exact")
    assert exact.restorable_tokens == 512


def test_progress_is_told_both_ways(origin, destination, tmp_path):
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))

    tokens = computed(origin)
    file = tmp_path / "it.kvport"
    info = origin.client.export("llama", file, tokens=tokens, progress=progress)
    assert told[-1] == (info.size_bytes, info.size_bytes)
    assert file.stat().st_mode & 0o777 == 0o600
    told.clear()
    destination.client.import_(file, progress=progress)
    assert told[-1] == (info.size_bytes, info.size_bytes)


def test_one_flipped_bit_is_refused(origin, destination):
    data = exported(origin)
    codes = set()
    for place in range(100, len(data), len(data) // 20):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        problem = refused(destination, bytes(damaged))
        assert problem.status == 422
        codes.add(problem.code)
    assert "digest_mismatch" in codes
    assert destination.client.import_(io.BytesIO(data)).restored_tokens == 700


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:-1],
        lambda d: d[: len(d) // 2],
        lambda d: d + b"\0",
        lambda d: d[:0],
    ],
)
def test_cut_and_extended_artifacts_are_refused(origin, destination, change):
    problem = refused(destination, change(exported(origin)))
    assert (problem.status, problem.code) == (422, "container")


def test_an_unknown_signer_is_refused(origin, destination):
    problem = refused(origin, exported(destination))
    assert (problem.status, problem.code) == (422, "untrusted_key")


def test_another_models_state_is_refused_with_what_differs(origin, destination):
    data = exported(origin)
    with pytest.raises(ProblemError) as refusal:
        destination.client.import_(io.BytesIO(data), model="qwen3_5")
    assert (refusal.value.status, refusal.value.code) == (422, "binding_mismatch")
    assert "model_files" in refusal.value.fields


def test_an_import_for_an_unknown_model_is_not_found(destination, origin):
    with pytest.raises(ProblemError) as refusal:
        destination.client.import_(io.BytesIO(exported(origin)), model="none")
    assert (refusal.value.status, refusal.value.code) == (404, "unknown_model")


def test_a_refused_server_answers_as_before(origin, destination):
    tokens = new_prompt()
    before = destination.client.complete("llama", tokens=tokens, logprobs=3)
    refused(destination, exported(origin)[:-1])
    after = destination.client.complete("llama", tokens=tokens, logprobs=3)
    assert after.logprobs == before.logprobs


def test_a_body_above_the_limit_of_artifacts_is_not_read(destination):
    with raw.connection(destination) as opened:
        size = (64 << 30) + 1
        path = "/api/cache/import"
        opened.sendall(raw.head(destination, "POST", path, content_length=size))
        assert raw.status(opened) == 413


def test_a_json_body_above_its_limit_is_refused(origin):
    with origin.http() as http:
        answer = http.post("/api/cache/probe", content=b" " * ((32 << 20) + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_an_artifact_above_the_frameworks_limit_is_taken(tmp_path, model_dir):
    big = model_dir("llama", kv_bytes_per_token=64 << 10)
    with (
        running(tmp_path / "a", big) as there,
        running(tmp_path / "b", big) as here,
    ):
        trust(here, there)
        data = exported(there)
        assert len(data) > 40 << 20
        assert here.client.import_(io.BytesIO(data)).restored_tokens == 700


def test_damage_on_the_way_out_breaks_the_export_off(tmp_path, model_dir):
    with running(tmp_path / "home", model_dir("llama")) as server:
        tokens = computed(server)
        server.node.volume.cache.flush()
        largest = max(
            (tmp_path / "home" / "cache" / "ns").rglob("*"),
            key=lambda path: path.stat().st_size if path.is_file() else 0,
        )
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
        file = tmp_path / "out" / "it.kvport"
        file.parent.mkdir()
        with pytest.raises(IncompleteError):
            server.client.export("llama", file, tokens=tokens)
        assert not list(file.parent.iterdir())
        assert server.client.stats()["cache"]["total"]["damaged"] == 1
        assert server.client.stats()["cache"]["leases"] == 0


def test_a_client_that_leaves_lets_the_path_go(tmp_path, model_dir):
    big = model_dir("llama", kv_bytes_per_token=64 << 10)
    with running(tmp_path / "home", big) as server, server.http() as http:
        body = {"model": "llama", "tokens": computed(server)}
        with http.stream("POST", "/api/cache/export", json=body) as answer:
            pieces = answer.iter_raw(1024)
            next(pieces)
            assert server.client.stats()["cache"]["leases"] == 1
        until(lambda: server.client.stats()["cache"]["leases"] == 0)


def test_an_import_that_is_broken_off_leaves_nothing(origin, destination):
    data = exported(origin)
    before = destination.client.stats()["cache"]["account"]
    with raw.connection(destination) as opened:
        begin_import(destination, opened, len(data))
        opened.sendall(data[: len(data) // 2])
    until(lambda: destination.client.stats()["cache"]["account"] == before)
    assert destination.client.import_(io.BytesIO(data)).restored_tokens == 700


def test_only_so_many_imports_run_at_once(origin, destination):
    data = exported(origin)
    with ExitStack() as opened:
        for _ in range(4):
            one = opened.enter_context(raw.connection(destination))
            begin_import(destination, one, len(data))
        with destination.http() as http:
            answer = http.post("/api/cache/import", content=data)
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert "retry-after" in answer.headers

    def taken() -> bool:
        with destination.http() as http:
            return http.post("/api/cache/import", content=data).status_code == 200

    until(taken)


def test_an_import_that_stalls_is_aborted_and_frees_its_slot(
    origin, tmp_path, model_dir
):
    data = exported(origin)
    with running(tmp_path / "home", model_dir("llama"), patience=0.2) as server:
        trust(server, origin)
        before = server.client.stats()["cache"]["account"]
        with ExitStack() as opened:
            stalled = [
                opened.enter_context(raw.connection(server)) for _ in range(IMPORTS)
            ]
            for one in stalled:
                begin_import(server, one, len(data))
                one.sendall(data[: len(data) // 2])
            answers = [raw.everything(one) for one in stalled]
            for answer in answers:
                assert answer.lstrip().startswith(b"HTTP/1.1 408 ")
                assert b'"code":"stalled"' in answer
        until(lambda: server.client.stats()["cache"]["account"] == before)
        assert server.client.import_(io.BytesIO(data)).restored_tokens == 700


def begin_import(server: Running, opened, size: int) -> None:
    """Send the head; returns once the server asks for the body."""
    opened.sendall(
        raw.head(
            server,
            "POST",
            "/api/cache/import",
            content_length=size,
            expect="100-continue",
        )
    )
    assert raw.status(opened) == 100


def until(condition) -> None:
    """Wait for what another thread is about to do."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it did not come about")


def test_exports_at_once_are_all_whole(origin, destination):
    tokens = computed(origin)
    bodies: list[bytes] = []

    def fetch() -> None:
        with origin.http() as http:
            body = {"model": "llama", "tokens": tokens}
            bodies.append(http.post("/api/cache/export", json=body).content)

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(bodies) == 6
    for data in bodies:
        assert destination.client.import_(io.BytesIO(data)).restored_tokens == 700
