"""An operator's orders, and how a server is asked to carry them out.

What it refuses is raised as `ProblemError`.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol

import msgspec

from kvport.api.admin_bodies import (
    ClearBody,
    NamespaceBody,
    PlanBody,
    ReleaseBody,
    ScrubBody,
)

Answer = dict[str, Any]
Call = Callable[..., Answer]
"""Method, path and a `json` body to an answer."""


class Administered(Protocol):
    """A cache that takes orders: here, or through a server.

    Attributes:
        is_here: whether what was started ends with this process.
    """

    is_here: ClassVar[bool]

    def stats(self) -> Answer:
        """All numbers: see docs/operations.md."""

    def namespaces(self) -> Answer:
        """All namespaces, with what is set about them."""

    def set_namespace(self, body: NamespaceBody) -> Answer:
        """Change settings; the namespace as it is then."""

    def plan(self, body: PlanBody) -> Answer:
        """What would go, and why; nothing does."""

    def gc(self) -> Answer:
        """Remove what is of no use."""

    def clear(self, body: ClearBody) -> Answer:
        """Remove what is meant."""

    def artifacts(self) -> Answer:
        """Exports that were kept, and imports."""

    def purge(self) -> Answer:
        """Do away with what came from keys that the trust list revokes."""

    def pins(self) -> Answer:
        """Why state stays: leases and pins."""

    def release(self, body: ReleaseBody) -> Answer:
        """End an owner's pins."""

    def scrub(self) -> Answer:
        """How far the scrub is."""

    def start_scrub(self, body: ScrubBody) -> Answer:
        """Read all that is stored, from where the last run stopped."""

    def stop_scrub(self) -> Answer:
        """Stop that, until it is started again."""


class AdminClient:
    """`Administered` by a server."""

    is_here: ClassVar[bool] = False

    def __init__(self, call: Call) -> None:
        """Orders through a client's calls."""
        self._call: Final = call

    def stats(self) -> Answer:
        """See `Client.stats`."""
        return self._call("GET", "/api/cache/stats")

    def namespaces(self) -> Answer:
        """All namespaces, with what is set about them."""
        return self._call("GET", "/api/cache/namespaces")

    def set_namespace(self, body: NamespaceBody) -> Answer:
        """Change settings; the namespace as it is then."""
        return self._call("PUT", "/api/cache/namespaces", json=_json(body))

    def plan(self, body: PlanBody) -> Answer:
        """What would go, and why; nothing does."""
        return self._call("POST", "/api/cache/plan", json=_json(body))

    def gc(self) -> Answer:
        """Remove what is of no use."""
        return self._call("POST", "/api/cache/gc")

    def clear(self, body: ClearBody) -> Answer:
        """Remove what is meant."""
        return self._call("POST", "/api/cache/clear", json=_json(body))

    def artifacts(self) -> Answer:
        """Exports that were kept, and imports."""
        return self._call("GET", "/api/cache/artifacts")

    def purge(self) -> Answer:
        """Have the server do away with what came from revoked keys."""
        return self._call("POST", "/api/cache/purge")

    def pins(self) -> Answer:
        """Why state stays: leases and pins."""
        return self._call("GET", "/api/cache/pins")

    def release(self, body: ReleaseBody) -> Answer:
        """End an owner's pins."""
        return self._call("POST", "/api/cache/pins/release", json=_json(body))

    def scrub(self) -> Answer:
        """How far the scrub is."""
        return self._call("GET", "/api/cache/scrub")

    def start_scrub(self, body: ScrubBody) -> Answer:
        """Have the server read all that is stored."""
        return self._call("POST", "/api/cache/scrub", json=_json(body))

    def stop_scrub(self) -> Answer:
        """Stop that, until it is started again."""
        return self._call("DELETE", "/api/cache/scrub")


def _json(body: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(body)
    return found
