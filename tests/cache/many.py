"""An index with very many entries, filled by the cache's own code; no files."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE, node_id
from kvport.manifest.tokens import prefix_keys
from kvport.snapshot.cache import schema
from kvport.snapshot.cache.account import Account
from kvport.snapshot.cache.ballast import Ballast
from kvport.snapshot.cache.clock import SYSTEM
from kvport.snapshot.cache.evict import Evictor
from kvport.snapshot.cache.files import Files
from kvport.snapshot.cache.index import Index
from kvport.snapshot.cache.lookup import Lookup
from kvport.snapshot.cache.mac import RowMac
from kvport.snapshot.cache.policies import Policies
from kvport.snapshot.cache.records import BlobRef, Match, Namespace, NodeRecord
from kvport.snapshot.cache.room import Room
from kvport.snapshot.cache.stats import Counters
from kvport.snapshot.cache.tally import Tally
from tests.cache.builder import BLOCK, COLD, DENSE, identity_of, select

TURNS: Final = 20
"""Entries of one conversation."""
TALKS: Final = 100
"""Conversations that are stored at once, turn by turn."""


class Filled:
    """Entries are nodes of 256 tokens with one blob, digests are random."""

    def __init__(self, root: Path) -> None:
        path = root / "index.sqlite"
        mac = RowMac(b"k" * 32, "ab")
        connection = schema.create(path, "ab", mac.root())
        # How long a commit takes is not the question here.
        connection.execute("PRAGMA synchronous=OFF")
        account = Account(1 << 40)
        self.index = Index(connection, path, account, mac, SYSTEM.wall)
        self.close = self.index.close
        self._random = random.Random(1)
        self._count = 0
        self._ns = Namespace.of(identity_of(DENSE), "default", BLOCK)
        self.index.add_namespace(self._ns)
        self._row = self.index.namespace_row(self._ns.id)
        files = Files(root, lambda: None)
        evictor = Evictor(
            self.index,
            files,
            account,
            Ballast(root),
            clocks=SYSTEM,
            policies=Policies(self.index, account, Tally(self.index), lambda _: {}),
            room=Room(files, account, 1 << 40, 0),
            counters=Counters(),
            on_removed=lambda _: None,
        )
        self._lookup = Lookup(self.index, files, evictor)

    def add(self, count: int) -> None:
        """Add entries of interleaved conversations."""
        while count > 0:
            talks = [self._path(self._random.randbytes(4 * BLOCK * TURNS))
                     for _ in range(min(TALKS, -(-count // TURNS)))]  # fmt: skip
            for turn in zip(*talks, strict=True):
                self._store(turn[:count])
                count -= len(turn)

    def add_path(self, length: int) -> bytes:
        """Add one path of so many entries; answers its encoded tokens."""
        tokens = self._random.randbytes(4 * BLOCK * length)
        self._store(list(self._path(tokens)))
        return tokens

    def match(self, tokens: bytes) -> Match | None:
        return self._lookup.match(self._ns, tokens, select())

    def bytes_an_entry(self) -> float:
        ((pages,),) = self.index.all("PRAGMA page_count")
        return pages * 4096 / self._count

    def _path(self, tokens: bytes) -> Iterator[NodeRecord]:
        parent, ends = ROOT_NODE, range(BLOCK, len(tokens) // 4 + 1, BLOCK)
        keys = prefix_keys(self._ns.identity.digest, BLOCK, tokens, ends)
        for end, key in zip(ends, keys, strict=True):
            ref = BlobRef(
                BlobClass.KV, self._random.randbytes(32), 262_244, trailer=4 * BLOCK
            )
            name = node_id(parent, key, {ref.blob_class: ref.digest})
            ids = tokens[4 * (end - BLOCK) : 4 * end]
            yield NodeRecord(
                name, parent, end - BLOCK, end, key, (ref,), frozenset(), (COLD,), ids
            )
            parent = name

    def _store(self, nodes: list[NodeRecord]) -> None:
        with self.index.transaction():
            for node in nodes:
                self.index.add_file(self._row, node.blobs[0], 270_336)
                self._count += self.index.add_node(self._row, node)
