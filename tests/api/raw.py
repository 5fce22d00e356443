"""HTTP by hand, for what well-behaved clients cannot be made to do."""

import contextlib
import socket
from collections.abc import Iterator

from tests.api.conftest import Running


@contextlib.contextmanager
def connection(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.server.port), 30) as opened:
        yield opened


def head(server: Running, method: str, path: str, **headers: str | int) -> bytes:
    """A request's head, with Host and key unless they are given."""
    given = {
        "host": f"127.0.0.1:{server.server.port}",
        "authorization": f"Bearer {server.key}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def status(opened: socket.socket) -> int:
    """The status of what comes back first."""
    line = b""
    while not line.endswith(b"\r\n"):
        byte = opened.recv(1)
        assert byte, "the connection was closed without an answer"
        line += byte
    return int(line.split()[1])


def everything(opened: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: opened.recv(1 << 16), b""))
