"""Bytes of live state: what running requests may hold at once.

A decode batch is padded on the left to its longest member, so what counts is members x
longest, not the sum of lengths.
"""

from collections.abc import Sequence

import attrs

from kvport.manifest.layout import BlobClass, StateLayout


@attrs.frozen
class Footprint:
    """Bytes of one sequence's live state: `fixed` + `per_row` x padded length."""

    per_row: int
    fixed: int

    def batch(self, lengths: Sequence[int]) -> int:
        """Bytes of a padded batch of sequences of these final lengths."""
        rows = max(lengths, default=0)
        return len(lengths) * (self.fixed + self.per_row * rows)


def footprint(layout: StateLayout, chunk: int) -> Footprint:
    """The footprint of a model's sequences.

    A rotating cache holds up to window - 1 + chunk rows while it prefills.
    """
    per_row = fixed = 0
    if layout.has(BlobClass.KV):
        per_row = _data(layout, BlobClass.KV, 1)
    if layout.has(BlobClass.WINDOW):
        fixed += _data(layout, BlobClass.WINDOW, 1) * (layout.max_window + chunk)
    if layout.has(BlobClass.STATE):
        fixed += _data(layout, BlobClass.STATE, 1)
    return Footprint(per_row, fixed)


def _data(layout: StateLayout, blob_class: BlobClass, rows: int) -> int:
    derived = layout.blob(blob_class, rows)
    return derived.size - len(derived.header)
