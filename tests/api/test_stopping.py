"""A server that is told to stop ends what runs, says so, and leaves no mess."""

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import attrs
import pytest

from kvport.api.client import Client
from kvport.api.errors import IncompleteError
from kvport.api.problems import ProblemError
from kvport.api.server import GRACE_SECONDS
from kvport.snapshot.keyring import Keyring
from tests.api import raw
from tests.api.conftest import running

SIGNALS = [signal.SIGINT, signal.SIGTERM]
ENDLESS = {"max_tokens": 1 << 19, "ignore_eos": True}


@attrs.frozen
class Serving:
    """A server in a process of its own."""

    process: subprocess.Popen
    home: Path
    client: Client
    key: str

    @property
    def port(self) -> int:
        return int(self.client.url.rpartition(":")[2])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[str, float]:
        """Its log, and the seconds that it took to end, without fault."""
        began = time.monotonic()
        self.process.send_signal(how)
        assert self.process.wait(60) == 0
        took = time.monotonic() - began
        log = (self.home / "log").read_text()
        assert "Traceback" not in log
        assert "Error" not in log
        assert not (self.home / "run.json").exists()
        return log, took


@pytest.fixture
def serving(tmp_path, model_dir):
    """Start a server; its log goes to a file, warnings of libraries included."""
    processes = []

    def start(**model) -> Serving:
        program = Path(__file__).with_name("serving.py")
        directory = model_dir("llama", **model)
        command = [sys.executable, str(program), str(tmp_path), str(directory)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        processes.append(process)
        assert json.loads(process.stdout.readline())
        client = Client.for_home(tmp_path)
        processes.append(client)
        return Serving(process, tmp_path, client, Keyring(tmp_path).api_key())

    yield start
    for one in processes:
        if isinstance(one, Client):
            one.close()
        else:
            one.kill()
            one.wait()
            one.stdout.close()


def outcome(work: Callable[[], object]) -> Queue:
    """What a call ends with, which is made in a thread."""
    found: Queue = Queue()

    def run() -> None:
        try:
            found.put(work())
        except Exception as error:  # noqa: BLE001 - for the test to look at
            found.put(error)

    threading.Thread(target=run).start()
    return found


def requests_arrive(server: Serving, number: int) -> None:
    for _ in range(1000):
        if server.client.stats()["models"]["llama"]["requests"] >= number:
            return
        time.sleep(0.01)
    pytest.fail("the requests did not arrive")


@pytest.mark.parametrize("how", SIGNALS)
def test_a_stream_ends_with_an_error_event(serving, how, tmp_path, model_dir):
    server = serving()
    stream = server.client.stream("llama", tokens=[1] * 600, **ENDLESS)
    next(stream)
    log = outcome(lambda: server.stop(how))
    with pytest.raises(ProblemError) as ended:
        list(stream)
    assert (ended.value.code, ended.value.status) == ("shutting_down", 503)
    text, took = log.get(timeout=60)
    assert text.count("stopping") == 1
    assert "requests_cut=1" in text
    assert took < GRACE_SECONDS + 5
    with running(tmp_path, model_dir("llama")) as again:
        probe = again.client.probe("llama", tokens=[1] * 600)
    assert probe.restorable_tokens == 599, "what was captured is kept"


@pytest.mark.parametrize("how", SIGNALS)
def test_a_request_that_is_not_streamed_is_answered_with_503(serving, how):
    server = serving()
    body = json.dumps({"model": "llama", "prompt": "on", **ENDLESS}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 30) as opened:
        opened.sendall(request(server, "/v1/completions", body))
        requests_arrive(server, 1)
        log, took = server.stop(how)
        head, _, answer = raw.everything(opened).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"content-type: application/problem+json" in head.lower()
    assert json.loads(answer)["code"] == "shutting_down"
    assert json.loads(answer)["error"]["code"] == "shutting_down"
    assert "requests_cut=1" in log
    assert took < GRACE_SECONDS + 5


def test_waiting_requests_are_answered_too(serving):
    """An exact request runs alone: the second one is still in the queue."""
    server = serving()
    many = [
        outcome(
            lambda: list(
                server.client.stream("llama", prompt="on", policy="exact", **ENDLESS)
            )
        )
        for _ in range(3)
    ]
    requests_arrive(server, 1)
    log, took = server.stop()
    for one in many:
        assert one.get(timeout=30).code == "shutting_down"
    assert "requests_cut=3" in log
    assert took < GRACE_SECONDS + 5


def test_an_export_is_broken_off(serving, tmp_path):
    server = serving(kv_bytes_per_token=64 << 10)
    tokens = [1 + i % 250 for i in range(1200)]
    server.client.complete("llama", tokens=tokens, max_tokens=1)
    got, stopped = io.BytesIO(), threading.Event()

    def wait(done: int, total: int) -> None:
        begun.put((done, total))
        stopped.wait(30)

    begun: Queue = Queue()
    export = outcome(
        lambda: server.client.export("llama", got, tokens=tokens, progress=wait)
    )
    done, total = begun.get(timeout=30)
    assert done < total
    log, took = server.stop()
    stopped.set()
    assert isinstance(export.get(timeout=30), IncompleteError)
    assert "requests_cut=1" in log
    assert took < GRACE_SECONDS


def test_an_import_is_refused(serving):
    server = serving()
    with socket.create_connection(("127.0.0.1", server.port), 30) as opened:
        head = request(server, "/api/cache/import", b"", size=1 << 20)
        opened.sendall(head.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert raw.status(opened) == 100
        log, _ = server.stop()
        answer = raw.everything(opened)
    assert b"HTTP/1.1 503 " in answer
    assert b'"error"' not in answer, "no address of OpenAI's"
    assert "requests_cut=1" in log


def test_a_client_that_does_not_read_delays_the_end_only_by_the_grace(serving):
    server = serving()
    options = {**ENDLESS, "stream": True, "logprobs": 20}
    body = json.dumps({"model": "llama", "prompt": "on", **options}).encode()
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", server.port))
        opened.sendall(request(server, "/v1/completions", body))
        requests_arrive(server, 1)
        # Computed beside it, token by token: the other has as many that cannot go out.
        server.client.complete("llama", prompt="on", max_tokens=300, ignore_eos=True)
        _, took = server.stop()
    assert GRACE_SECONDS < took < GRACE_SECONDS + 5


def test_a_server_without_requests_stops_at_once(serving):
    server = serving()
    log, took = server.stop()
    assert "requests_cut=0" in log
    assert took < GRACE_SECONDS


def request(server: Serving, path: str, body: bytes, size: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: 127.0.0.1:{server.port}",
        f"authorization: Bearer {server.key}",
        f"content-length: {len(body) if size is None else size}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
