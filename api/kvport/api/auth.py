"""Who may call: the Host header and the bearer key, before anything else is looked at.

* A page in a browser can make the browser send requests to loopback. It cannot set
  the key; and a name that it rebinds to loopback is not among our hosts.
* One key, of the one scope `default`; `/healthz` alone is open.
"""

import secrets
from typing import Final

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from kvport.api.errors import UnauthorizedError, WrongHostError

OPEN_PATHS: Final = frozenset({"/healthz"})
_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


class Guard(ASGIMiddleware):
    """Lets requests with our address and our key through."""

    def __init__(self, key: str) -> None:
        self._key = key.encode("ascii")

    async def handle(
        self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp
    ) -> None:
        """Refuse, or pass on.

        Raises:
            WrongHostError: the Host header is not an address of this server.
            UnauthorizedError: there is no key, or it is not ours.
        """
        if _header(scope, b"host") not in _hosts(scope):
            raise WrongHostError("the Host header is not an address of this server")
        if scope["path"] not in OPEN_PATHS and not self._authorized(scope):
            raise UnauthorizedError("the request carries no key of this server")
        await next_app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        scheme, _, given = (_header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(given, self._key)


def _header(scope: Scope, name: bytes) -> bytes | None:
    """A header's value; None if it is missing or there is more than one."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


def _hosts(scope: Scope) -> frozenset[bytes]:
    """Host headers that mean the address which the request came in at."""
    address, port = scope["server"] or ("", None)
    # An address of ours cannot be rebound; names other than localhost can.
    literal = f"[{address}]" if ":" in address else address
    names = {*_NAMES, literal}
    ports = ["", ":80"] if port == 80 else [f":{port}"]
    return frozenset((name + end).encode() for name in names for end in ports)
