"""Who may call: every address but one needs the key, and our own Host."""

import httpx
import pytest

from tests.api import raw

PROTECTED = [
    ("POST", "/api/cache/export"),
    ("POST", "/api/cache/import"),
    ("POST", "/api/cache/probe"),
    ("GET", "/api/cache/stats"),
    ("GET", "/metrics"),
    ("GET", "/api/cache/artifacts"),
    ("GET", f"/api/cache/artifacts/blake3:{'0' * 64}"),
    ("GET", "/v1/models"),
    ("POST", "/v1/models/load"),
    ("POST", "/v1/models/unload"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/schema"),
    ("GET", "/schemas/v1/manifest.schema.json"),
    ("GET", "/"),
    ("GET", "/no/such/address"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_every_address_needs_the_key(origin, method, path):
    answer = httpx.request(method, origin.url + path, trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["code"] == "unauthorized"


@pytest.mark.parametrize("scheme", ["Basic", "Bearer ", "Token", "Bearer\t"])
def test_the_key_counts_only_as_a_bearer_key(origin, scheme):
    with origin.http(authorization=f"{scheme} {origin.key}") as http:
        assert http.get("/v1/models").status_code == 401


@pytest.mark.parametrize("change", [lambda k: k[:-1], lambda k: k + "A", str.lower])
def test_a_key_that_differs_is_refused(origin, change):
    with origin.http(authorization=f"Bearer {change(origin.key)}") as http:
        assert http.get("/v1/models").status_code == 401


def test_health_is_open_and_shows_the_home(origin, destination):
    answer = httpx.get(f"{origin.url}/healthz", trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["home"] != destination.client.health().home


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_names_with_the_port_are_ours(origin, name):
    with origin.http(host=f"{name}:{origin.server.port}") as http:
        assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/no/such/address"])
@pytest.mark.parametrize(
    "host",
    ["rebound.example:{port}", "localhost", "localhost:1", "", "localhost.:{port}"],
)
def test_other_hosts_are_refused(origin, host, path):
    with origin.http(host=host.format(port=origin.server.port)) as http:
        answer = http.get(path)
    assert (answer.status_code, answer.json()["code"]) == (421, "wrong_host")


def test_two_hosts_are_refused(origin):
    with raw.connection(origin) as opened:
        head = raw.head(origin, "GET", "/healthz")
        opened.sendall(head.replace(b"\r\n\r\n", b"\r\nhost: rebound.example\r\n\r\n"))
        assert raw.status(opened) == 421


def test_no_cross_origin_access_is_granted(origin):
    with origin.http(origin="https://page.example") as http:
        answer = http.get("/v1/models")
        preflight = http.options("/v1/models")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert not [name for name in preflight.headers if name.startswith("access-control")]
