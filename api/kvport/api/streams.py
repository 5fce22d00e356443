"""Blocking transfers beside the event loop: one thread each, a megabyte at a time.

* Every call on an export or import is made in its own thread, in order, so that it is
  never used by two at once and closing needs no wait.
* Two pieces are in memory at most: one on the network, one with the thread.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

import structlog
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Scope, Send

from kvport.manifest.errors import KvportError

PIECE: Final = 1 << 20

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Held(Generic[T]):
    """Something that one thread of its own opens, uses and closes."""

    def __init__(
        self, name: str, opening: Callable[[], T], closing: Callable[[T], None]
    ) -> None:
        """Begin to open it; `close` must be called in any case."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvport-{name}")
        self._closing = closing
        self._closed = False
        self._opened: Future[T] = self._thread.submit(opening)

    async def opened(self) -> T:
        """The thing itself, for what does not block; raises what opening raised."""
        return await asyncio.wrap_future(self._opened)

    def start(self, work: Callable[[T], R]) -> Future[R]:
        """Run `work` in its thread, after all that was started before."""
        return self._thread.submit(lambda: work(self._opened.result()))

    async def run(self, work: Callable[[T], R]) -> R:
        """Run `work` in its thread and wait for it."""
        return await asyncio.wrap_future(self.start(work))

    def close(self) -> None:
        """Close it after what runs now; returns at once, a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._opened.cancelled() or self._opened.exception() is not None:
            return
        try:
            self._closing(self._opened.result())
        except Exception:
            log.exception("transfer_not_closed")


async def outgoing(
    held: Held[T], stream: Callable[[T], Iterator[bytes]]
) -> AsyncGenerator[bytes, None]:
    """The bytes of a held export, in pieces of about a megabyte.

    Raises:
        KvportError: what the export raised; the client sees a body shorter than
            announced.
    """
    source = await held.run(stream)
    ahead = held.start(lambda _: _fill(source))
    while piece := await asyncio.wrap_future(ahead):
        ahead = held.start(lambda _: _fill(source))
        yield piece


def _fill(source: Iterator[bytes]) -> bytes:
    piece = bytearray()
    for chunk in source:
        piece += chunk
        if len(piece) >= PIECE:
            break
    return bytes(piece)


async def incoming(
    held: Held[T], chunks: AsyncIterator[bytes], feed: Callable[[T, bytes], None]
) -> None:
    """Feed a request's body to a held import; the network waits when the disk does.

    Raises:
        KvportError: what the import refused.
    """
    buffer = bytearray()
    fed: Future[None] | None = None

    async def hand_over() -> None:
        nonlocal fed
        piece = bytes(buffer)
        buffer.clear()
        if fed is not None:
            await asyncio.wrap_future(fed)
        fed = held.start(lambda thing: feed(thing, piece))

    async for chunk in chunks:
        buffer += chunk
        if len(buffer) >= PIECE:
            await hand_over()
    await hand_over()
    if fed is not None:
        await asyncio.wrap_future(fed)


async def gone(receive: Receive) -> None:
    """Return when the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Streamed(Response[None]):
    """A streamed response that lets go of its source for certain, however it ends."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        closing: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        """A response with status 200.

        Args:
            pieces: the body; it may never be started, so it cannot clean up itself.
            closing: called once, at the end.
            media_type: of the body.
            headers: further headers.
        """
        super().__init__(None, media_type=media_type, headers=dict(headers))
        self._pieces = pieces
        self._end = closing

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """The framework's hook; its arguments concern cookies and defaults."""
        response = _StreamedBody(
            iterator=self._pieces,
            media_type=self.media_type,
            headers=self.headers,
            status_code=200,
        )
        response.closing = self._end
        return response


class _StreamedBody(ASGIStreamingResponse):
    closing: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.closing()

    async def send_body(self, send: Send, receive: Receive) -> None:
        sending = asyncio.ensure_future(self._stream(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except KvportError as error:
            # The server closes a connection whose body was not completed.
            log.warning("response_broken_off", code=error.code)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
