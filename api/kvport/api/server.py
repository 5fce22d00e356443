"""A node served over HTTP, from a claimed port to an orderly end."""

import asyncio
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
from kvport.api.routes_cache import PATIENCE_SECONDS
from kvport.api.run_file import announced
from kvport.api.stopping import Stoppable
from kvport.snapshot.node import Node

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 2.0
"""What clients get to read how their requests ended; then they are disconnected."""
_TICK_SECONDS: Final = 0.02
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def claim_socket(host: str, port: int) -> socket.socket:
    """A port to serve on later; until then connections to it are refused.

    Args:
        host: name or address to listen on.
        port: 0 takes a free one.

    Raises:
        PortError: it is taken, or not ours to take.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claimed = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier server may linger; another server that has claimed
        # the port, but does not listen yet, counts as long as it does not allow reuse.
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind((host, port))
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        claimed.close()
        raise _port_error(port, error) from error
    return claimed


class Server:
    """One node on one port; `run` serves until a signal, or until `stop`."""

    def __init__(
        self,
        node: Node,
        listening: socket.socket,
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Listen; what connects is answered once `run` does.

        Args:
            node: closed by `run`.
            listening: from `claim_socket`; closed by `run`.
            patience: seconds for which an import's client may send nothing.

        Raises:
            PortError: another process took the port in spite of the claim.
            KeyFileError: the API key cannot be read.
        """
        self._node = node
        self._listening = listening
        host, self.port = listening.getsockname()[:2]
        literal = f"[{host}]" if ":" in host else host
        self.url: Final = f"http://{literal}:{self.port}"
        app = Stoppable(create_app(node, patience=patience))
        try:
            listening.listen(socket.SOMAXCONN)
            # The next server shall have the port although our connections linger.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError as error:
            raise _port_error(self.port, error) from error
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off"
        )
        self._uvicorn = _Uvicorn(config, app)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serve; returns when all is closed, the node included.

        Args:
            ready: called with the address once requests are answered.
        """
        home = self._node.settings.home
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._node.close)
            cleanup.callback(self._listening.close)

            def started() -> None:
                cleanup.enter_context(announced(home, self.url, self.port))
                log.info("serving", url=self.url)
                if ready is not None:
                    ready(self.url)

            self._uvicorn.started_hook = started
            self._uvicorn.run(sockets=[self._listening])

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._uvicorn.should_exit = True


def serve(
    node: Node,
    listening: socket.socket,
    *,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a node until SIGINT or SIGTERM, then close it.

    Args:
        node: closed in any case.
        listening: from `claim_socket`; closed in any case.
        ready: called with the server's address once it answers.

    Raises:
        PortError: another process took the port in spite of the claim.
        KeyFileError: the API key cannot be read.
    """
    try:
        server = Server(node, listening)
    except BaseException:
        listening.close()
        node.close()
        raise
    server.run(ready)


class _Uvicorn(uvicorn.Server):
    started_hook: Callable[[], None]

    def __init__(self, config: uvicorn.Config, app: Stoppable) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_hook()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Instead of uvicorn's, which knows only to wait, and then to cancel."""
        for server in self.servers:
            server.close()
        for one in sockets or []:
            one.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        log.info("stopping", requests_cut=self._app.stop())
        # A severed transfer ends only with its connection.
        await self._until(lambda: len(state.connections) <= self._app.severed)
        for connection in list(state.connections):
            connection.transport.abort()
        await self._until(lambda: not state.tasks)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait, but not for ever, and not after a second Ctrl-C."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                # uvicorn tells nobody when its connections and tasks end.
                while not condition() and not self.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(_TICK_SECONDS)

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


def _port_error(port: int, error: OSError) -> PortError:
    reason = error.strerror or "it cannot be bound"
    return PortError(f"port {port} cannot be had: {reason}")
