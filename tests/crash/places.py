"""Directories under test, opened: a cache, or a home with a ledger beside it."""

from pathlib import Path

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.records import BlobRef, Namespace, NodeRecord
from tests.cache.builder import (
    ALL,
    DENSE,
    HYBRID,
    ME,
    WINDOWED,
    identity_of,
    noise,
    open_cache,
)
from tests.transfer import world

VARIANTS = range(8)
"""Seeds of made-up bytes: any of them is right for a key, and nothing else is."""

SPACES = {
    "dense": (DENSE, "default"),
    "hybrid": (HYBRID, "default"),
    "windowed": (WINDOWED, "default"),
    "all": (ALL, "default"),
    "other": (DENSE, "other"),
}


class Place:
    """A cache below a directory.

    Attributes:
        root: the cache's root.
        cache: open.
        home: None; a home if there is more than the cache.
    """

    cap = 8 * MIB

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "cache"
        self.home: world.Home | None = None
        self.local = ME
        self._open()

    def space(self, name: str) -> Namespace:
        layout, scope = SPACES[name]
        return self.cache.namespace(identity_of(layout), scope, 256)

    def is_right(self, node: NodeRecord, ref: BlobRef, data: bytes) -> bool:
        """Whether these bytes are a function of the node's key."""
        return any(
            noise((ref.blob_class, variant, node.key), ref.size) == data
            for variant in VARIANTS
        )

    def close(self) -> None:
        self.cache.close()

    def _open(self) -> None:
        self.cache = open_cache(self.root, self.cap)


class TightPlace(Place):
    """A cache with the smallest cap there is."""

    cap = 4 * MIB


class HomePlace(Place):
    """A home: a cache, and the ledger of what came in."""

    home: world.Home

    def space(self, name: str) -> Namespace:
        assert name == "home"
        return self.home.ns

    def is_right(self, node: NodeRecord, ref: BlobRef, data: bytes) -> bool:
        layout, kind, rows = self.home.ns.layout, ref.blob_class, node.end - node.start
        return data == world.blob_of(layout, kind, rows, f" {kind} {node.key.hex()}")

    def close(self) -> None:
        self.home.close()

    def _open(self) -> None:
        self.home = world.Home(self.directory, cap=self.cap)
        self.cache, self.local = self.home.cache, self.home.key_id
