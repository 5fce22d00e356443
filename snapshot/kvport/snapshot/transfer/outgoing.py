"""Blobs on their way out of the cache: read in pieces, checked, and encoded.

In: references to stored blobs. Out: the bytes that stand in the container. The last of
a blob's bytes is only given out once all of them were found right.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
from blake3 import blake3

from kvport.manifest.arithmetic import PlacedBlob
from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.codec import Codec, is_encoded_size
from kvport.manifest.digests import BlobDigest
from kvport.manifest.limits import MIB
from kvport.manifest.model import Manifest
from kvport.manifest.parts import Blob
from kvport.manifest.verified import BlobEntry
from kvport.snapshot.cache.blob_stream import BlobStream
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import BlobRef, Namespace
from kvport.snapshot.errors import DamagedError
from kvport.snapshot.transfer.codec import Encoder

PIECE_BYTES: Final = MIB


def plain(cache: Cache, namespace: Namespace, ref: BlobRef) -> Iterator[bytes]:
    """A blob's bytes, in pieces of at most `PIECE_BYTES`.

    Raises:
        DamagedError: they are not those that were stored; what owns them is removed.
        GoneError: the blob was removed.
        StorageError: no file could be opened.
    """
    hasher, held, left = blake3(), b"", ref.size
    with cache.open_blob(namespace, ref) as file:
        while left and (piece := _read(file, min(left, PIECE_BYTES))):
            if held:
                yield held
            hasher.update(piece)
            held, left = piece, left - len(piece)
    if left or hasher.digest() != ref.digest:
        cache.report_damage(namespace, ref)
        raise DamagedError("a stored blob was found damaged while it was sent")
    yield held


def encoded(
    cache: Cache, namespace: Namespace, ref: BlobRef, layout: BlobLayout
) -> Iterator[bytes]:
    """A blob's bytes as `shuffle-zstd` has them; errors as of `plain`."""
    encoder = Encoder(layout)
    for piece in plain(cache, namespace, ref):
        yield from encoder.feed(piece)
    yield encoder.finish()


def read_blob(
    cache: Cache,
    namespace: Namespace,
    refs: Mapping[BlobDigest, BlobRef],
    blob: BlobEntry | PlacedBlob,
) -> Iterator[bytes]:
    """A blob's bytes as its codec has them; errors as of `plain`."""
    ref = refs[blob.digest]
    if blob.codec is Codec.NONE:
        return plain(cache, namespace, ref)
    return encoded(cache, namespace, ref, blob.layout)


def compress(
    cache: Cache,
    namespace: Namespace,
    manifest: Manifest,
    refs: Mapping[BlobDigest, BlobRef],
) -> Manifest:
    """The manifest with each blob encoded that may be so; errors as of `plain`.

    All blobs are read and encoded, for their sizes; nothing of them is kept. `refs` are
    those of the path.
    """
    sizes: dict[BlobDigest, int] = {}

    def encode(blob: Blob, rows: int) -> Blob:
        if (size := sizes.get(blob.digest)) is None:
            layout = namespace.layout.blob(blob.blob_class, rows)
            ref = refs[blob.digest]
            size = sum(map(len, encoded(cache, namespace, ref, layout)))
            sizes[blob.digest] = size
        if not is_encoded_size(size, blob.size):
            return blob
        return attrs.evolve(blob, codec=Codec.SHUFFLE_ZSTD, encoded_size=size)

    return attrs.evolve(
        manifest,
        segments=tuple(
            attrs.evolve(s, blobs=tuple(encode(b, s.end - s.start) for b in s.blobs))
            for s in manifest.segments
        ),
        points=tuple(
            attrs.evolve(p, blobs=tuple(encode(b, 1) for b in p.blobs))
            for p in manifest.points
        ),
    )


def _read(file: BlobStream, size: int) -> bytes:
    """The next bytes; none at the end, or where the medium fails."""
    try:
        return file.read(size) or b""
    except OSError:
        return b""
