"""Servers in threads of the test process: real sockets, real tiny models."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import httpx
import pytest

from kvport.api.client import Client
from kvport.api.server import Server, claim_socket
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.node import Node, NodeSettings


@attrs.frozen
class Running:
    """A server that answers."""

    node: Node
    server: Server
    client: Client

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def home(self) -> Path:
        return self.node.settings.home

    @property
    def key(self) -> str:
        return Keyring(self.home).api_key()

    def http(self, **headers: str) -> httpx.Client:
        """A plain HTTP client with the key."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key}", **headers},
            timeout=60,
            trust_env=False,
        )


@contextlib.contextmanager
def running(
    home: Path, *models: Path, patience: float = 60, **settings
) -> Iterator[Running]:
    tuning = Tuning(chunk=256, stride=256)
    settings = {"tuning": tuning, "cap_bytes": 1 << 30, "free_floor": 0, **settings}
    node = Node.open(NodeSettings(home=home, **settings))
    with contextlib.ExitStack() as undo:
        undo.callback(node.close)
        for model in models:
            node.load_model(str(model))
        server = Server(node, claim_socket("127.0.0.1", 0), patience=patience)
        undo.pop_all()
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _: ready.set(),))
    thread.start()
    try:
        assert ready.wait(30)
        with Client.for_home(home) as client:
            yield Running(node, server, client)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


def trust(here: Running, there: Running) -> None:
    """Let one server import what the other signs."""
    from kvport.manifest.trust import TrustEntry

    public = there.node.keyring.signing_key().public
    here.node.keyring.add(TrustEntry(public_key=public, name="there"))


@pytest.fixture(scope="session")
def models(model_dir) -> tuple[Path, Path]:
    return model_dir("llama"), model_dir("qwen3_5")


@pytest.fixture(scope="session")
def origin(tmp_path_factory, models) -> Iterator[Running]:
    """Where prompts are computed, and exported."""
    with running(tmp_path_factory.mktemp("origin"), *models) as server:
        yield server


@pytest.fixture(scope="session")
def destination(tmp_path_factory, models, origin) -> Iterator[Running]:
    """Another home with nothing shared, which trusts the origin's key."""
    with running(tmp_path_factory.mktemp("destination"), *models) as server:
        trust(server, origin)
        yield server
