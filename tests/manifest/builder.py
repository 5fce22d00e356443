"""Small true artifacts, and the means to sign whatever is made of them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from blake3 import blake3

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import BlobDigest, blob_digest, format_digest
from kvport.manifest.envelope import sign_payload
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
from kvport.manifest.model import Info, Manifest, Session
from kvport.manifest.parts import Blob, Point, Prefix, Segment
from kvport.manifest.signed import Local
from kvport.manifest.terms import Issuer, Terms
from kvport.manifest.tokens import encode_tokens, prefix_keys
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.manifest.ustar import TRAILER, blob_name, header, padding
from kvport.manifest.verified import VerifiedManifest
from kvport.manifest.verify import verify

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
KEY = SigningKey.from_bytes(bytes(range(32)))
OTHER_KEY = SigningKey.from_bytes(bytes(range(32, 64)))
TOKENIZER = BlobDigest(bytes(range(64, 96)))
MODEL = "tiny"
SESSION = Session("agent-7", 3)
NUMERICS = Numerics("0.32.4", "cpu", "", "netlib", 1, 512, compile=True)

KV = CacheLayout(
    "0",
    CacheKind.KV,
    None,
    (LeafSpec("k", "F16", (1, 2, -1, 3)), LeafSpec("v", "F16", (1, 2, -1, 3))),
)
WINDOW = CacheLayout("1", CacheKind.ROTATING, 3, (LeafSpec("k", "F32", (1, -1, 2)),))
WHOLE = CacheLayout("2", CacheKind.ARRAYS, None, (LeafSpec("s0", "F32", (1, 5)),))

DENSE = StateLayout((KV,))
WINDOWED = StateLayout((KV, WINDOW))
HYBRID = StateLayout((KV, WHOLE))
ALL = StateLayout((KV, WINDOW, WHOLE))


def identity_of(layout: StateLayout, model: str = "weights") -> StateIdentity:
    """An identity with this layout, of a model with these weights."""
    return StateIdentity(
        model_files=format_digest(blob_digest(model.encode())),
        adapters=(),
        quant={},
        kv="model",
        layout=layout,
        mlx_lm="0.32.2",
    )


@attrs.frozen(kw_only=True)
class ManifestBuilder:
    """One artifact: change a field with `attrs.evolve`, its JSON with `signed`.

    Ten tokens in blocks of four; the block ends and `cuts` cut it into segments.
    """

    layout: StateLayout = ALL
    tokens: tuple[int, ...] = tuple(range(100, 110))
    block_size: int = 4
    cuts: tuple[int, ...] = (6,)
    points: Mapping[int, tuple[PointKind, ...]] = attrs.field(
        factory=lambda: {
            6: (PointKind.FORK,),
            10: (PointKind.PROMPT, PointKind.STRIDE),
        }
    )
    key: SigningKey = KEY
    name: str = "mac-a"
    scope: str = "default"
    audience: tuple[Any, ...] = ()
    created: datetime = NOW
    expires: datetime = NOW + timedelta(days=30)
    session: Session = SESSION

    @property
    def identity(self) -> StateIdentity:
        return identity_of(self.layout)

    @property
    def token_bytes(self) -> bytes:
        return encode_tokens(self.tokens)

    @property
    def ends(self) -> list[int]:
        blocks = range(self.block_size, len(self.tokens), self.block_size)
        return sorted({*blocks, *self.cuts, *self.points, len(self.tokens)})

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip([0, *self.ends], self.ends, strict=False))

    def manifest(self) -> Manifest:
        """A manifest in which all is true."""
        ends, ranges = self.ends, self.ranges
        keys = prefix_keys(
            self.identity.digest, self.block_size, self.token_bytes, ends
        )
        segments = tuple(
            Segment(
                start,
                end,
                key,
                self.provenance(start),
                tuple(self._blob(c, start, end) for c in self._rows(start, end)),
            )
            for (start, end), key in zip(ranges, keys, strict=True)
        )
        points = tuple(
            Point(
                end,
                self.points[end],
                self.provenance(start),
                tuple(self._blob(c, start, end) for c in self._whole(end)),
            )
            for start, end in ranges
            if end in self.points
        )
        data = self.token_bytes
        return Manifest(
            block_size=self.block_size,
            identity=self.identity,
            tokenizer=TOKENIZER,
            prefix=Prefix(len(self.tokens), keys[-1], blob_digest(data), len(data)),
            segments=segments,
            points=points,
            terms=Terms(
                scope=self.scope,
                issuer=Issuer(self.key.public.key_id, self.name),
                created=self.created,
                expires=self.expires,
                nonce="00112233445566778899aabbccddeeff",
                audience=self.audience,
            ),
            session=self.session,
            info=Info(host="mac-a.local", exporter="kvport 0.1.0"),
        )

    def provenance(self, start: int) -> Provenance:
        """The first segment is cold, the others are not."""
        lineage = Lineage.COLD if start == 0 else Lineage.DERIVED
        return Provenance(lineage, NUMERICS, frozenset({self.key.public.key_id}))

    def payload(self) -> dict[str, Any]:
        """The manifest's JSON, to be edited and given to `signed`."""
        return self.manifest().to_json()

    def signed(
        self,
        payload: Mapping[str, Any] | bytes | None = None,
        signers: Sequence[SigningKey] | None = None,
    ) -> bytes:
        """The envelope around a payload, signed by the issuer or by others."""
        if payload is None:
            payload = self.payload()
        if not isinstance(payload, bytes):
            payload = canonical_dumps(payload)
        return sign_payload(payload, [self.key] if signers is None else signers)

    def trust(self, **limits: Any) -> TrustList:
        """A list with the issuer's key, trusted within limits."""
        return TrustList.of(
            [TrustEntry(public_key=self.key.public, name=self.name, **limits)]
        )

    def local(self, **other: Any) -> Local:
        """The node that the artifact fits, or one that differs."""
        fitting = Local(self.identity, TOKENIZER, self.block_size, MODEL)
        return attrs.evolve(fitting, **other)

    def verified(self, envelope: bytes | None = None, **other: Any) -> VerifiedManifest:
        """Verify, by default what is true, where it fits."""
        arguments: dict[str, Any] = {
            "trust": self.trust(),
            "now": self.created,
            "local": self.local(),
            "own_key": None,
        }
        data = self.signed() if envelope is None else envelope
        return verify(data, **{**arguments, **other})

    def blobs(self) -> dict[BlobDigest, bytes]:
        """Content of every blob, by digest."""
        contents = [
            self.content(blob_class, start, end)
            for start, end in self.ranges
            for blob_class in [*self._rows(start, end), *self._whole(end)]
        ]
        return {blob_digest(content): content for content in contents}

    def content(self, blob_class: BlobClass, start: int, end: int) -> bytes:
        """A blob: the derived header, then bytes that follow from class and range."""
        layout = self._layout(blob_class, start, end)
        label = f"{blob_class} {start} {end}".encode()
        return layout.header + blake3(label).digest(layout.size - len(layout.header))

    def container(self, envelope: bytes | None = None) -> bytes:
        """The whole file, around any envelope."""
        data = self.signed() if envelope is None else envelope
        named = {blob_name(digest): blob for digest, blob in self.blobs().items()}
        named |= {"envelope.json": data, "tokens": self.token_bytes}
        entries = [entry.name for entry in self.verified().entries()]
        return pack([(name, named[name]) for name in entries])

    def _rows(self, start: int, end: int) -> list[BlobClass]:
        # Row by row, so that it is not the code that it is compared with.
        window = self.layout.max_window
        needed = {row for p in self.points for row in range(p - window, p)}
        dropped = set() if needed & set(range(start, end)) else {BlobClass.WINDOW}
        return [
            c
            for c in self.layout.blob_classes
            if c not in dropped and c is not BlobClass.STATE
        ]

    def _whole(self, end: int) -> list[BlobClass]:
        held = self.layout.has(BlobClass.STATE) and end in self.points
        return [BlobClass.STATE] if held else []

    def _blob(self, blob_class: BlobClass, start: int, end: int) -> Blob:
        content = self.content(blob_class, start, end)
        return Blob(blob_class, blob_digest(content), len(content))

    def _layout(self, blob_class: BlobClass, start: int, end: int) -> BlobLayout:
        return self.layout.blob(blob_class, end - start)


def pack(contents: Sequence[tuple[str, bytes]]) -> bytes:
    """A container of these entries, in this order."""
    parts = [
        header(name, len(data)) + data + padding(len(data)) for name, data in contents
    ]
    return b"".join(parts) + TRAILER
