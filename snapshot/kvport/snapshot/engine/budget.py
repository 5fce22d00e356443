"""Bytes of live state: what running requests may hold at once.

A decode batch is padded on the left to its longest member, so what counts is members x
longest, not the sum of lengths.
"""

import os
from collections.abc import Sequence
from typing import Final, Self

import attrs
import mlx.core as mx

from kvport.manifest.layout import BlobClass, StateLayout
from kvport.manifest.limits import GIB

_LEAST: Final = GIB


@attrs.frozen
class Footprint:
    """Bytes of one sequence's live state: `fixed` + `per_row` x padded length."""

    per_row: int
    fixed: int

    def batch(self, lengths: Sequence[int]) -> int:
        """Bytes of a padded batch of sequences of these final lengths."""
        rows = max(lengths, default=0)
        return len(lengths) * (self.fixed + self.per_row * rows)


@attrs.frozen
class Budget:
    """Bytes that running sequences may hold; of an unknown layout, as many as come."""

    nbytes: int
    footprint: Footprint | None

    @classmethod
    def of(cls, layout: StateLayout | None, chunk: int, nbytes: int) -> Self:
        """The budget of a model's sequences, which are prefilled by chunks."""
        return cls(nbytes, footprint(layout, chunk) if layout else None)

    def allows(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these final lengths may run together."""
        return self.footprint is None or self.footprint.batch(lengths) <= self.nbytes


def footprint(layout: StateLayout, chunk: int) -> Footprint:
    """The footprint of a model's sequences.

    A rotating cache holds up to window - 1 + chunk rows while it prefills, and capture
    another window, until it is known whether a point needs it.
    """
    per_row = fixed = 0
    if layout.has(BlobClass.KV):
        per_row = _data(layout, BlobClass.KV, 1)
    if layout.has(BlobClass.WINDOW):
        rows = layout.head + 2 * layout.max_window + chunk
        fixed += _data(layout, BlobClass.WINDOW, 1) * rows
    if layout.has(BlobClass.STATE):
        fixed += _data(layout, BlobClass.STATE, 1)
    return Footprint(per_row, fixed)


def default_budget(weights: int) -> int:
    """Bytes of live state for a model with `weights` bytes, if nobody says otherwise.

    Half of what is left of the memory that mlx may use: a restore holds its state a
    second time for a moment, and other programs run here too.
    """
    usable = mx.device_info().get("max_recommended_working_set_size")
    if usable is None:  # the CPU backend tells nothing of memory
        usable = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max((int(usable) - weights) // 2, _LEAST)


def _data(layout: StateLayout, blob_class: BlobClass, rows: int) -> int:
    derived = layout.blob(blob_class, rows)
    return derived.size - len(derived.header)
