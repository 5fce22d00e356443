"""Errors over HTTP: one table, one form, and nothing said that should not be."""

import re
from pathlib import Path

import httpx
import pytest

from kvport.api import errors_page
from kvport.api.problems import LOCAL, STATUS, Problem, ProblemError
from kvport.manifest.errors import KvportError
from tests.api.conftest import running

ROOT = Path(__file__).parents[2]


def test_every_code_has_one_status_or_never_crosses_http():
    codes = {cls.code for cls in errors_page.known()}
    assert codes == STATUS.keys() | LOCAL
    assert not STATUS.keys() & LOCAL


def test_every_code_in_the_sources_is_known():
    sources = [
        path.read_text()
        for root in ("manifest", "snapshot", "api")
        for path in (ROOT / root).rglob("*.py")
    ]
    pattern = re.compile(r'^    code(?:: ClassVar\[str\])? = "(\w+)"$', re.MULTILINE)
    found = {code for text in sources for code in pattern.findall(text)}
    assert found == {cls.code for cls in errors_page.known()}


def test_every_status_is_an_errors():
    assert all(400 <= status < 600 for status in STATUS.values())


def test_the_page_of_errors_is_the_tables():
    assert (ROOT / "docs" / "errors.md").read_text() == errors_page.page()


def test_a_code_that_the_table_lacks_is_a_failure_of_the_server():
    class NewError(KvportError):
        code = "brand_new"

    assert Problem.of(NewError("x")).status == 500


def test_a_problem_survives_the_way():
    error = KvportError("what happened", fields=("a", "b"))
    problem = ProblemError(Problem.of(error))
    assert (problem.code, problem.message, problem.fields) == (
        "internal", "what happened", ("a", "b"),
    )  # fmt: skip
    assert (problem.status, problem.advice) == (500, KvportError.advice)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/no/such/address", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/api/cache/import", 405, "method_not_allowed"),
    ],
)
def test_the_frameworks_refusals_are_problems(origin, method, path, status, code):
    with origin.http() as http:
        answer = http.request(method, path)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert answer.status_code == problem["status"] == status
    assert problem["code"] == code
    assert problem["type"] == f"urn:kvport:error:{code}"
    members = {"type", "title", "status", "detail", "code"}
    assert set(problem) == members | ({"error"} if path.startswith("/v1/") else set())


def test_openai_clients_find_their_error_in_a_problem(origin):
    with origin.http() as http:
        answer = http.post("/v1/completions", json={"model": "llama", "prompt": []})
        unnamed = http.post("/v1/completions", content=b"{")
    problem = answer.json()
    assert (problem["code"], problem["fields"]) == ("bad_request", ["prompt"])
    assert problem["error"] == {
        "message": problem["detail"], "type": "bad_request",
        "code": "bad_request", "param": "prompt",
    }  # fmt: skip
    assert unnamed.json()["error"]["param"] is None


@pytest.mark.parametrize("key", [{}, {"authorization": "Bearer no"}])
def test_openai_clients_find_it_in_the_guards_refusals_too(origin, key):
    answer = httpx.get(f"{origin.url}/v1/models", headers=key, trust_env=False)
    assert answer.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("path", ["/api/cache/probe", "/v1beta"])
def test_other_addresses_have_plain_problems(origin, path):
    with origin.http() as http:
        assert "error" not in http.post(path, content=b"{").json()


def test_an_unexpected_failure_says_nothing_of_itself(tmp_path, model_dir):
    with running(tmp_path / "home", model_dir("llama")) as server:
        real, server.node.artifacts = server.node.artifacts, None
        try:
            with server.http() as http:
                answer = http.get("/api/cache/artifacts")
        finally:
            server.node.artifacts = real
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal"
    assert "NoneType" not in answer.text
    assert str(tmp_path) not in answer.text


def test_bytes_that_are_no_http_do_not_stop_the_server(origin):
    from tests.api import raw

    with raw.connection(origin) as opened:
        opened.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert raw.status(opened) == 400
    assert httpx.get(f"{origin.url}/healthz", trust_env=False).status_code == 200
