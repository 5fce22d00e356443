"""What must add up in a manifest, before any blob is read.

* Segments are contiguous from 0 to the prefix's length, and none crosses a block end.
* Points ascend; each is the end of a segment, and says the provenance of that segment:
  the two are one node of the tree. It has a state blob if the layout has whole layers.
* The prefix ends in a restore point: a listed one, unless all layers are full.
* A segment has a `kv` blob if the layout has full layers, then a `window` blob if a
  point needs it (coverage.py): what is missing would break a restore, and what nobody
  needs is not carried.
* Sizes are those that the layout gives; equal digests are blobs of equal layout and
  encoding.
* The work of deriving all layouts is within `DERIVED_TENSORS`: a short manifest could
  ask for thousands of row counts of thousands of tensors.
* An encoded blob is smaller than the plain one, and not absurdly so (codec.py); one
  that is not encoded has its size.
"""

from collections.abc import Iterator

import attrs

from kvport.manifest.blob_layout import BlobLayout
from kvport.manifest.codec import Codec, is_encoded_size
from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.digests import BlobDigest
from kvport.manifest.errors import ArithmeticMismatchError, LimitExceededError
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import DERIVED_TENSORS
from kvport.manifest.model import Manifest
from kvport.manifest.parts import Blob, Point, Segment
from kvport.manifest.tokens import TOKEN_SIZE


@attrs.frozen
class PlacedBlob:
    """A blob of the manifest, with the layout that its plain bytes must have."""

    digest: BlobDigest
    layout: BlobLayout
    codec: Codec
    encoded_size: int


def check_arithmetic(manifest: Manifest) -> tuple[PlacedBlob, ...]:
    """Check all of the rules above.

    Returns:
        Each different blob once, in the order of the container: boundaries by position,
        then segments by position, `kv` before `window`.

    Raises:
        ArithmeticMismatchError: something does not add up.
        LimitExceededError: a blob of the layout would be too large, or there are too
            many different ones.
    """
    prefix = manifest.prefix
    if prefix.tokens == 0 or prefix.size != prefix.tokens * TOKEN_SIZE:
        raise ArithmeticMismatchError("the token entry's size is not that of its ids")
    _check_segments(manifest)
    _check_points(manifest)
    _check_rows(manifest)
    _check_work(manifest)
    found: dict[BlobDigest, PlacedBlob] = {}
    for blob, rows in _blobs_in_order(manifest):
        layout = manifest.identity.layout.blob(blob.blob_class, rows)
        if blob.size != layout.size:
            raise ArithmeticMismatchError("a blob's size is not that of its layout")
        if not _is_encoded_size(blob):
            raise ArithmeticMismatchError("a blob's encoded size is not of its codec")
        this = PlacedBlob(blob.digest, layout, blob.codec, blob.encoded_size)
        placed = found.setdefault(blob.digest, this)
        if placed.layout.header != layout.header:
            raise ArithmeticMismatchError("two layouts are claimed for one blob")
        if placed != this:
            raise ArithmeticMismatchError("two encodings are claimed for one blob")
    return tuple(found.values())


def _is_encoded_size(blob: Blob) -> bool:
    if blob.codec is Codec.NONE:
        return blob.encoded_size == blob.size
    return is_encoded_size(blob.encoded_size, blob.size)


def _check_segments(manifest: Manifest) -> None:
    at = 0
    for segment in manifest.segments:
        if segment.start != at or segment.end <= at:
            raise ArithmeticMismatchError("segments are not contiguous from 0")
        if at // manifest.block_size != (segment.end - 1) // manifest.block_size:
            raise ArithmeticMismatchError("a segment crosses a block end")
        at = segment.end
    if at != manifest.prefix.tokens:
        raise ArithmeticMismatchError("segments do not end where the prefix ends")
    if manifest.segments[-1].key != manifest.prefix.key:
        raise ArithmeticMismatchError("the last segment's key is not the prefix's")


def _check_points(manifest: Manifest) -> None:
    layout = manifest.identity.layout
    classes = [BlobClass.STATE] if layout.has(BlobClass.STATE) else []
    ends = {segment.end: segment for segment in manifest.segments}
    at = 0
    for point in manifest.points:
        if point.position <= at:
            raise ArithmeticMismatchError("points do not ascend")
        if not (segment := ends.get(point.position)):
            raise ArithmeticMismatchError("a point is not the end of a segment")
        if point.provenance != segment.provenance:
            raise ArithmeticMismatchError("a point disagrees with its segment")
        if _classes_of(point) != classes:
            raise ArithmeticMismatchError("a point's blobs are not the layout's")
        at = point.position
    if at != manifest.prefix.tokens and not layout.full_only:
        raise ArithmeticMismatchError("the prefix does not end in a restore point")


def _check_rows(manifest: Manifest) -> None:
    layout = manifest.identity.layout
    coverage = WindowCoverage.of(layout)
    points = [point.position for point in manifest.points]
    for segment in manifest.segments:
        classes = [BlobClass.KV] if layout.has(BlobClass.KV) else []
        if coverage.needs(segment.start, segment.end, points):
            classes.append(BlobClass.WINDOW)
        if _classes_of(segment) != classes:
            raise ArithmeticMismatchError(
                "a segment's blobs are not those it must have"
            )


def _check_work(manifest: Manifest) -> None:
    layout = manifest.identity.layout
    derived = {(blob.blob_class, rows) for blob, rows in _blobs_in_order(manifest)}
    work = sum(len(layout.leaves(blob_class)) for blob_class, _ in derived)
    if work > DERIVED_TENSORS:
        raise LimitExceededError("the manifest has too many different blobs")


def _classes_of(part: Segment | Point) -> list[BlobClass]:
    return [blob.blob_class for blob in part.blobs]


def _blobs_in_order(manifest: Manifest) -> Iterator[tuple[Blob, int]]:
    for point in manifest.points:
        for blob in point.blobs:
            yield blob, 1
    for segment in manifest.segments:
        for blob in segment.blobs:
            yield blob, segment.end - segment.start
