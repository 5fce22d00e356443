"""A server's life: found through its home, ended in order, never mistaken."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from kvport.api.client import Client
from kvport.api.errors import (
    NoServerError,
    PortError,
    UnreachableError,
    WrongServerError,
)
from kvport.api.server import Server, claim_socket, serve
from kvport.snapshot.errors import KeyFileError
from kvport.snapshot.node import Node, NodeSettings
from tests.api.conftest import Running, running


def test_a_running_server_is_announced_in_its_home(origin):
    file = origin.home / "run.json"
    assert file.stat().st_mode & 0o777 == 0o600
    info = json.loads(file.read_bytes())
    assert (info["pid"], info["url"]) == (os.getpid(), origin.url)
    assert info["port"] == origin.server.port


def test_an_ended_server_is_announced_no_more(tmp_path):
    with running(tmp_path) as server:
        url = server.url
    assert not (tmp_path / "run.json").exists()
    with pytest.raises(NoServerError):
        Client.for_home(tmp_path)
    with pytest.raises(UnreachableError):
        Client.for_home(tmp_path, url)


def test_an_announcement_without_an_owner_is_not_believed(tmp_path, origin):
    with running(tmp_path):
        pass
    (tmp_path / "run.json").write_bytes((origin.home / "run.json").read_bytes())
    with pytest.raises(NoServerError):
        Client.for_home(tmp_path)


def test_no_key_is_sent_to_another_homes_server(origin, destination):
    with pytest.raises(WrongServerError):
        Client.for_home(origin.home, destination.url)


def test_a_damaged_announcement_is_none(tmp_path):
    with running(tmp_path) as server:
        for data in (b"", b"{}", b'{"pid": "1"}', b"\xff"):
            (server.home / "run.json").write_bytes(data)
            with pytest.raises(NoServerError):
                Client.for_home(tmp_path)


def test_what_answers_but_is_no_kvport_is_refused(origin):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            opened, _ = listener.accept()
            with opened:
                opened.recv(4096)
                opened.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(UnreachableError):
            Client.for_home(origin.home, f"http://127.0.0.1:{port}")
        thread.join(30)


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_that_another_server_has_cannot_be_claimed(listens):
    with claim_socket("127.0.0.1", 0) as taken:
        if listens:
            taken.listen()
        with pytest.raises(PortError):
            claim_socket("127.0.0.1", taken.getsockname()[1])


def test_a_claimed_port_refuses_until_it_is_served():
    with claim_socket("127.0.0.1", 0) as claimed, pytest.raises(ConnectionRefusedError):
        socket.create_connection(claimed.getsockname(), 5)


def test_what_cannot_be_served_is_closed(tmp_path):
    node = Node.open(NodeSettings(home=tmp_path, cap_bytes=1 << 30, free_floor=0))
    claimed = claim_socket("127.0.0.1", 0)
    (tmp_path / "keys" / "api.key").unlink()
    with pytest.raises(KeyFileError):
        serve(node, claimed)
    assert claimed.fileno() == -1
    Node.open(NodeSettings(home=tmp_path, cap_bytes=1 << 30, free_floor=0)).close()


def test_the_same_port_can_be_had_again_at_once(tmp_path):
    with running(tmp_path) as server:
        port = server.server.port
        server.client.health()
    node = Node.open(NodeSettings(home=tmp_path, cap_bytes=1 << 30, free_floor=0))
    again = Server(node, claim_socket("127.0.0.1", port))
    again.stop()
    again.run()
    assert again.port == port


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_schema_says_what_becomes_of_each_field(origin: Running, path):
    with origin.http() as http:
        operation = http.get("/schema").json()["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    taken, ignored, refused, rest = operation["description"].split("\n\n")[1:]
    for name, schema in content["schema"]["properties"].items():
        place = taken
        if "Ignored" in schema.get("description", ""):
            place = ignored
        elif name in {"n", "presence_penalty", "response_format", "suffix", "echo"}:
            place = refused
        if place is not taken or f"`{name}`" not in refused:
            assert f"`{name}`" in place
    assert "`n` (1)" in refused
    assert rest == "All other fields are refused."


def test_the_schema_describes_the_bodies(origin: Running):
    with origin.http() as http:
        schema = http.get("/schema").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]
    described = body["content"]["application/json"]["schema"]
    assert {"model", "prompt"} <= set(described["required"])
    assert "policy" in described["properties"]["cache"]["properties"]


def test_every_reference_in_the_schema_leads_somewhere(origin: Running):
    with origin.http() as http:
        schema = http.get("/schema").json()

    def references(value):
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                yield from references(one)

    for reference in references(schema):
        place = schema
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_published_schemas_are_those_of_the_checkout(origin: Running):
    files = sorted((Path(__file__).parents[2] / "schemas").glob("v1/*.json"))
    assert files
    with origin.http() as http:
        for path in files:
            answer = http.get(f"/schemas/v1/{path.name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/schema+json"
            assert answer.content == path.read_bytes()
        for name in ("v2/manifest.schema.json", "v1/none", "v1/..%2fv1", "v1"):
            answer = http.get(f"/schemas/{name}")
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_the_schema_has_every_address(origin: Running):
    with origin.http() as http:
        paths = http.get("/schema").json()["paths"]
    assert {path: sorted(methods) for path, methods in paths.items()} == {
        "/api/cache/artifacts": ["get"],
        "/api/cache/artifacts/{artifact}": ["get"],
        "/api/cache/clear": ["post"],
        "/api/cache/export": ["post"],
        "/api/cache/gc": ["post"],
        "/api/cache/import": ["post"],
        "/api/cache/namespaces": ["get", "put"],
        "/api/cache/pins": ["get"],
        "/api/cache/pins/release": ["post"],
        "/api/cache/plan": ["post"],
        "/api/cache/probe": ["post"],
        "/api/cache/purge": ["post"],
        "/api/cache/scrub": ["delete", "get", "post"],
        "/api/cache/stats": ["get"],
        "/healthz": ["get"],
        "/metrics": ["get"],
        "/schemas/{version}/{name}": ["get"],
        "/v1/chat/completions": ["post"],
        "/v1/completions": ["post"],
        "/v1/models": ["get"],
        "/v1/models/load": ["post"],
        "/v1/models/unload": ["post"],
    }
    assert all(
        "requestBody" in methods["post"]
        for methods in paths.values()
        if "post" in methods
    )


def test_stats_count_bytes_and_tokens(origin: Running):
    before = origin.client.stats()["models"]["llama"]
    done = origin.client.complete("llama", prompt="count me", max_tokens=3)
    after = origin.client.stats()["models"]["llama"]
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == done.prompt_tokens
    origin.client.probe("llama", prompt="count me")  # waits for what is being stored
    cache = origin.client.stats()["cache"]
    assert set(cache["account"])
    total = cache["total"]
    assert total["captured_tokens"] > 0
    assert total["written_per_captured_token"] > 0
    assert set(total["pruned"]) <= {"window", "state"}
    assert total["failed_prunings"] == 0


def test_a_proxy_of_the_environment_never_sees_the_key(origin, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with Client.for_home(origin.home) as client:
        assert client.health().status == "ok"


def test_the_client_needs_neither_mlx_nor_the_framework():
    heavy = ("mlx", "mlx_lm", "litestar", "uvicorn")
    program = (
        "import sys, kvport.api.client;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_health_has_the_version(origin):
    answer = httpx.get(f"{origin.url}/healthz", trust_env=False)
    assert answer.json()["version"]
