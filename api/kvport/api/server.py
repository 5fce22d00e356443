"""A node served over HTTP, from a bound port to an orderly end."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import structlog
import uvicorn

from kvport.api.app import create_app
from kvport.api.errors import PortError
from kvport.api.run_file import announced
from kvport.snapshot.node import Node

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 2
"""What running requests get when the server is told to stop; then they are ended."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Server:
    """One node on one port; `run` serves until a signal, or until `stop`."""

    def __init__(self, node: Node, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind the port; 0 takes a free one.

        Raises:
            PortError: it is taken, or not ours to take.
            KeyFileError: the API key cannot be read.
        """
        self._node = node
        app = create_app(node)
        self._listener = _bind(host, port)
        self.port: Final[int] = self._listener.getsockname()[1]
        literal = f"[{host}]" if ":" in host else host
        self.url: Final = f"http://{literal}:{self.port}"
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._uvicorn = _Uvicorn(config)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serve; returns when all is closed, the node included.

        Args:
            ready: called with the address once requests are answered.
        """
        home = self._node.settings.home
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._node.close)
            cleanup.callback(self._listener.close)

            def started() -> None:
                cleanup.enter_context(announced(home, self.url, self.port))
                log.info("serving", url=self.url)
                if ready is not None:
                    ready(self.url)

            self._uvicorn.started_hook = started
            self._uvicorn.run(sockets=[self._listener])

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._uvicorn.should_exit = True


def serve(
    node: Node,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a node until SIGINT or SIGTERM, then close it.

    Args:
        node: closed in any case.
        host: address to listen on.
        port: 0 takes a free one.
        ready: called with the server's address once it answers.

    Raises:
        PortError: the port cannot be had.
        KeyFileError: the API key cannot be read.
    """
    try:
        server = Server(node, host=host, port=port)
    except BaseException:
        node.close()
        raise
    server.run(ready)


class _Uvicorn(uvicorn.Server):
    started_hook: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_hook()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again at the end.

        That would kill the process before its cache is flushed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or "it cannot be bound"
        raise PortError(f"port {port} cannot be had: {reason}") from error
    return listener
