"""Homes with real caches, ledgers and keys; prefixes of made-up bytes in them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from blake3 import blake3

from kvport.manifest.digests import format_digest
from kvport.manifest.identity import (
    Lineage,
    Numerics,
    PointKind,
    Provenance,
    StateIdentity,
)
from kvport.manifest.keys import SigningKey
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import MIB
from kvport.manifest.nodes import ROOT_NODE, NodeId
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.tokens import encode_tokens, prefix_keys
from kvport.manifest.trust import Revocation, TrustEntry, TrustList
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.clock import SYSTEM, Clocks
from kvport.snapshot.cache.records import Match, NewSegment, NodeRecord, Selection
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.revoking import PurgeOutcome, Revoking
from kvport.snapshot.transfer.exporter import Export, Issue, open_export
from kvport.snapshot.transfer.importer import Import, ImportResult, LocalModel
from kvport.snapshot.transfer.ledger import Ledger

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
TOKENIZER = format_digest(bytes(range(32)))
NUMERICS = Numerics("0.32.4", "cpu", "", "netlib", 1, 4, compile=False)
BLOCK = 4
TOKENS = list(range(100, 111))
CUTS = (4, 8, 10, 11)
KINDS = {10: {PointKind.FORK}, 11: {PointKind.PROMPT, PointKind.REPLY}}

_KV_LEAVES = (LeafSpec("k", "F16", (1, 2, -1, 3)), LeafSpec("v", "F32", (1, 2, -1, 2)))
KV = CacheLayout("0", CacheKind.KV, None, _KV_LEAVES)
ROTATING = CacheLayout("1", CacheKind.ROTATING, 3, (LeafSpec("k", "F32", (1, -1, 2)),))
ARRAYS = CacheLayout("2", CacheKind.ARRAYS, None, (LeafSpec("s0", "F32", (1, 5)),))

DENSE = StateLayout((KV,))
WINDOWED = StateLayout((KV, ROTATING))
HYBRID = StateLayout((KV, ARRAYS))
ALL = StateLayout((KV, ROTATING, ARRAYS))


def identity_of(layout: StateLayout, **other: Any) -> StateIdentity:
    fields: dict[str, Any] = {
        "model_files": format_digest(bytes(32)),
        "adapters": (),
        "quant": {"bits": 4},
        "kv": "model",
        "layout": layout,
        "mlx_lm": "0.32.2",
    }
    return StateIdentity(**fields | other)


def blob_of(layout: StateLayout, blob_class: BlobClass, rows: int, seed: str) -> bytes:
    """A blob of noise; of what can be compressed, if the seed begins with `smooth`."""
    derived = layout.blob(blob_class, rows)
    size = derived.size - len(derived.header)
    if seed.startswith("smooth"):
        # Not too much: what would be less than a 128th is not compressed.
        noise = blake3(seed.encode()).digest(size // 32 + 32)
        body = (noise + bytes(size))[:size]
    else:
        body = blake3(seed.encode()).digest(size)
    return derived.header + body


class Home:
    """One node without an engine."""

    def __init__(
        self,
        directory: Path,
        *,
        layout: StateLayout = ALL,
        block_size: int = BLOCK,
        scope: str = "default",
        tokenizer: str = TOKENIZER,
        cap: int = 64 * MIB,
        clocks: Clocks = SYSTEM,
        **identity: Any,
    ) -> None:
        directory.mkdir(exist_ok=True)
        seed = blake3(directory.name.encode()).digest()
        self.directory = directory
        self.key = SigningKey.from_bytes(seed)
        self.key_id = self.key.public.key_id
        self.recipient = RecipientKey.from_bytes(blake3(seed).digest())
        self.sealing_secret = seed
        self.trusted = [self.key]
        self.revoked: list[SigningKey] = []
        with ExitStack() as opened:
            self.ledger = Ledger(directory / "state.sqlite")
            opened.callback(self.ledger.close)
            self.cache = opened.enter_context(
                Cache.open(
                    Opening(
                        root=directory / "cache",
                        cap_bytes=cap,
                        free_floor=0,
                        on_removed=self.ledger.record_removed,
                        clocks=clocks,
                    )
                )
            )
            self.ledger.reconcile(self.cache)
            self.ns = self.cache.namespace(
                identity_of(layout, **identity), scope, block_size
            )
            self._stack = opened.pop_all()
        self.models = [LocalModel("tiny", tokenizer, self.ns)]

    def close(self) -> None:
        self._stack.close()

    def trust(self) -> TrustList:
        keys = {key.public.key_id: key.public for key in self.trusted}
        entries = [TrustEntry(public_key=k, name="k") for k in keys.values()]
        revoked = [Revocation(key_id=k.public.key_id, at=NOW) for k in self.revoked]
        return TrustList.of(entries).revoke(revoked)

    def purge(self, *keys: SigningKey) -> PurgeOutcome:
        """Revoke keys, and do away with what came from them."""
        self.revoked += keys
        return Revoking(
            trust=self.trust, cache=lambda: self.cache, ledger=self.ledger
        ).purge()

    # Storing.

    def segments(
        self,
        tokens: Sequence[int] = TOKENS,
        cuts: Sequence[int] = CUTS,
        *,
        start: int = 0,
        kinds: Mapping[int, Iterable[PointKind]] = KINDS,
        windows: Iterable[int] | None = None,
        variant: str = "",
        lineage: Lineage = Lineage.DERIVED,
    ) -> Iterable[NewSegment]:
        """Segments; those ending in `windows`, or that a point needs, have windows."""
        encoded, layout = encode_tokens(tokens), self.ns.layout
        identity, block = self.ns.identity.digest, self.ns.block_size
        keys = prefix_keys(identity, block, encoded, cuts)
        for end, key in zip(cuts, keys, strict=True):
            left_out = set() if end in kinds else {BlobClass.STATE}
            if windows is None:
                within = (r for p in kinds for r in range(p - layout.max_window, p))
                has_window = not {*within}.isdisjoint(range(start, end))
            else:
                has_window = end in windows
            if not has_window:
                left_out.add(BlobClass.WINDOW)
            classes = [c for c in layout.blob_classes if c not in left_out]
            yield NewSegment(
                start=start,
                end=end,
                key=key,
                tokens=encoded[4 * start : 4 * end],
                kinds=frozenset(kinds.get(end, ())),
                blobs={
                    c: [blob_of(layout, c, end - start, f"{variant} {c} {key.hex()}")]
                    for c in classes
                },
                provenance=Provenance(lineage, NUMERICS, frozenset({self.key_id})),
            )
            start = end

    def store(
        self,
        tokens: Sequence[int] = TOKENS,
        cuts: Sequence[int] = CUTS,
        *,
        tip: NodeId = ROOT_NODE,
        retention: Retention | None = None,
        **options: Any,
    ) -> NodeId:
        chain = self.cache.chain(self.ns, tip, "test", retention)
        for segment in self.segments(tokens, cuts, **options):
            chain.append(segment)
        chain.close()
        self.cache.flush()
        assert chain.broken is None
        return chain.tip

    def prune(self, node: NodeRecord, blob_class: BlobClass) -> None:
        """Take a blob from a node, as retention does: the node keeps its name."""
        index, ref = self.cache._index, node.blob(blob_class)
        assert ref is not None
        n = index.find(index.namespace_row(self.ns.id), node.id)
        with index.transaction():
            index.drop(n, [blob_class], node.kinds)
        self.cache._evictor.unlink_doomed()

    # Moving.

    def issue(self, **other: Any) -> Issue:
        fields: dict[str, Any] = {
            "signer": self.key,
            "issuer_name": self.directory.name,
            "model_name": "tiny",
            "tokenizer": self.models[0].tokenizer_digest,
            "now": NOW,
            "sealing_secret": self.sealing_secret,
        }
        return Issue(**fields | other)

    def open_export(self, tokens: Sequence[int] = TOKENS, **issue: Any) -> Export:
        return open_export(
            self.cache, self.ledger, self.ns, encode_tokens(tokens), self.issue(**issue)
        )

    def export(self, tokens: Sequence[int] = TOKENS, **issue: Any) -> bytes:
        return b"".join(self.open_export(tokens, **issue).stream())

    def reopening(self) -> dict[str, Any]:
        return {
            "scope": "default",
            "key": self.key.public,
            "sealing_secret": self.sealing_secret,
            "now": NOW,
        }

    def start_import(self, **other: Any) -> Import:
        arguments: dict[str, Any] = {
            "cache": self.cache,
            "ledger": self.ledger,
            "models": self.models,
            "trust": self.trust,
            "local": self.key_id,
            "recipient": lambda: self.recipient,
            "now": lambda: NOW,
        }
        return Import(**arguments | other)

    def take(self, data: bytes, *, step: int = 1 << 20, **other: Any) -> ImportResult:
        running = self.start_import(**other)
        for start in range(0, len(data), step):
            running.feed(data[start : start + step])
        return running.finish()

    # Looking.

    def match(self, tokens: Sequence[int] = TOKENS, **options: Any) -> Match | None:
        selection = Selection(limit=len(tokens), local=self.key_id, **options)
        return self.cache.match(self.ns, encode_tokens(tokens), selection)

    def contents(self, nodes: Sequence[NodeRecord]) -> list[bytes]:
        return [bytes(self.cache.read(self.ns, r)) for n in nodes for r in n.blobs]

    def state(self) -> dict[str, Any]:
        """Everything that a refused import must leave as it is."""
        root = self.directory / "cache"
        files = {
            str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
            for path in root.rglob("*")
            if not path.name.startswith("index.sqlite")
        }
        account = self.cache.stats().account
        return {
            "files": files,
            "index": dump(self.cache._index),
            "ledger": dump(self.ledger),
            # Other programs write to the volume, too.
            "account": attrs.evolve(account, index=0, free=0, effective=0),
            "leases": self.cache.stats().leases,
        }


def dump(database: Any) -> dict[str, list[Any]]:
    """All rows of all tables, without recency and times."""
    connection = database._connection
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    found = {}
    for (table,) in tables.fetchall():
        cursor = connection.execute(f"SELECT * FROM {table}")  # noqa: S608 - its own
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        for row in rows:
            for name in ("used", "at", "clock"):
                row.pop(name, None)
        found[table] = rows
    return found
