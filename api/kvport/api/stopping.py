"""An orderly end of the requests that still run when the server stops.

* What has not begun to answer is answered with 503; a stream of tokens ends with an
  event `error`.
* A transfer cannot end in order: its length was announced. It sends no more, until its
  connection is closed.
* All of this stands around the application: no handler knows of it.
"""

import asyncio
from typing import Final

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from kvport.api import media
from kvport.api.problems import Problem
from kvport.api.streams import gone
from kvport.snapshot.errors import EngineStoppedError

_STOPPING: Final = Problem.of(EngineStoppedError("the server is shutting down"))


class Stoppable:
    """An application, and the requests that run in it; one event loop's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._stopping = asyncio.Event()
        self.running = 0
        """Requests that have not ended."""
        self.severed = 0
        """Of these, transfers that wait for their connection to be closed."""

    def stop(self) -> int:
        """Tell all requests to end; answers how many those are."""
        self._stopping.set()
        return self.running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; once the server stops, end it."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        self.running += 1
        try:
            answer = _Answer(send)
            if not await self._run(scope, receive, answer.send):
                await self._end(answer, scope["path"], receive)
        finally:
            self.running -= 1

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Run the application; False if it was stopped."""
        working = asyncio.ensure_future(self._app(scope, receive, send))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return True
            return False
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _end(self, answer: "_Answer", path: str, receive: Receive) -> None:
        if answer.media_type is None:
            await answer.refuse(_STOPPING.at(path).encode())
        elif answer.complete:
            return
        elif answer.media_type.startswith(media.EVENTS):
            await answer.finish(_STOPPING.event())
        else:
            self.severed += 1
            try:
                await gone(receive)
            finally:
                self.severed -= 1


class _Answer:
    """How far an answer has come; every message goes out whole or not at all."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.media_type: str | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.media_type = headers.get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)

    async def refuse(self, body: bytes) -> None:
        headers = [
            (b"content-type", media.PROBLEM.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"connection", b"close"),
        ]
        await self._send(
            {
                "type": "http.response.start",
                "status": _STOPPING.status,
                "headers": headers,
            }
        )
        await self.finish(body)

    async def finish(self, body: bytes) -> None:
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": False}
        )
