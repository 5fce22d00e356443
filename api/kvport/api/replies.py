"""Replies: the engine's events, brought from its thread into the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final, TypeVar

from litestar.types import Receive

from kvport.api.errors import StalledError
from kvport.api.streams import gone
from kvport.manifest.errors import KvportError
from kvport.snapshot.engine.requests import (
    Event,
    Failed,
    Generated,
    Request,
    Started,
)
from kvport.snapshot.errors import EngineStoppedError
from kvport.snapshot.node import Node

T = TypeVar("T")

_UNREAD: Final = 4096
"""Events that may wait for a client that reads slowly, or not at all."""


class ClientGoneError(Exception):
    """The client has gone away: there is nobody to answer."""


class Reply:
    """One submitted request; `cancel` must be called when nobody listens any more."""

    def __init__(self, node: Node, model: str, request: Request) -> None:
        """Submit it.

        Raises:
            KvportError: the engine does not take it.
        """
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._overrun = False
        loop = asyncio.get_running_loop()

        def sink(event: Event) -> None:
            if self._events.qsize() >= _UNREAD:
                self._overrun = True
                self.cancel()
            # At shutdown the loop may be closed before the engine is.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._ticket = node.submit(model, request, sink)

    async def restored(self) -> int:
        """Tokens that were restored, once the request has left the queue.

        Raises:
            KvportError: it ended before.
        """
        event = await self._events.get()
        if isinstance(event, Started):
            return event.restored
        raise self._ending(event)

    async def tokens(self) -> AsyncGenerator[Generated, None]:
        """The reply's tokens, as they come.

        Raises:
            KvportError: it ended without having finished.
        """
        while True:
            event = await self._events.get()
            if not isinstance(event, Generated):
                raise self._ending(event)
            yield event
            if event.finish is not None:
                return

    def cancel(self) -> None:
        """End it, if it has not ended; returns at once."""
        self._ticket.cancel()

    def _ending(self, event: Event) -> KvportError:
        if isinstance(event, Failed):
            return event.error
        if self._overrun:
            return StalledError("the reply was not read, and has been ended")
        # Else we cancel only when we listen no more: it was the engine that stopped.
        return EngineStoppedError("the server is shutting down")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: the client has gone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
