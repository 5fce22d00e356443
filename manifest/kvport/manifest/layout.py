"""The layout of a model's state, and the one safetensors header it permits.

A layout lists the cache objects of a model, each with its layer class and its tensors
(*leaves*). Everything about a blob follows from layout, class and row count: its
tensors, their order, its header byte for byte, its size. So a blob's own header is
never an authority: it is derived here and compared.

Tensors are named `<cache>.<leaf>`: `3.k`, or `3.1.v` for member 1 of a cache list. They
stand in a blob sorted by name, without gaps; the header has no `__metadata__` and is
padded with spaces to a multiple of 8 bytes. Format of the container: safetensors
("u64 little-endian header length, JSON header, data").
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import attrs

from kvport.manifest.blob_layout import DTYPE_BYTES, ROWS, BlobLayout, Leaf
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    FormatError,
    LimitExceededError,
)
from kvport.manifest.fields import take, take_exact
from kvport.manifest.limits import CACHES, LEAVES

_PATH: Final = re.compile(r"(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){0,3}", re.ASCII)
_LEAF: Final = re.compile(r"[a-z][a-z0-9_]{0,15}", re.ASCII)


class LayerClass(StrEnum):
    """How a layer's state relates to positions."""

    FULL = "full"
    """Rows kept for ever."""
    WINDOWED = "windowed"
    """Rows needed only within `window` of a restore point."""
    WHOLE = "whole"
    """One state at one position."""


class BlobClass(StrEnum):
    """What a blob holds; one blob per segment or boundary and class."""

    KV = "kv"
    WINDOW = "window"
    STATE = "state"

    @property
    def layer_class(self) -> LayerClass:
        """The layers whose tensors blobs of this class hold."""
        return _LAYER_OF_BLOB[self]


_LAYER_OF_BLOB: Final = {
    BlobClass.KV: LayerClass.FULL,
    BlobClass.WINDOW: LayerClass.WINDOWED,
    BlobClass.STATE: LayerClass.WHOLE,
}


class CacheKind(StrEnum):
    """Closed registry of cache objects; never a class name from a file."""

    KV = "kv"
    QUANTIZED = "quantized"
    ROTATING = "rotating"
    CHUNKED = "chunked"
    ARRAYS = "arrays"


CLASS_OF_KIND: Final = {
    CacheKind.KV: LayerClass.FULL,
    CacheKind.QUANTIZED: LayerClass.FULL,
    CacheKind.ROTATING: LayerClass.WINDOWED,
    CacheKind.CHUNKED: LayerClass.WINDOWED,
    CacheKind.ARRAYS: LayerClass.WHOLE,
}

_NUMBERS: Final[dict[CacheKind, tuple[str, ...]]] = {
    CacheKind.KV: (),
    CacheKind.QUANTIZED: ("bits", "group_size"),
    CacheKind.ROTATING: ("window", "keep"),
    CacheKind.CHUNKED: ("window",),
    CacheKind.ARRAYS: ("slots",),
}
"""What a kind needs besides its leaves, to be rebuilt."""


@attrs.frozen
class LeafSpec:
    """One tensor of a cache object; a `ROWS` dimension stands for the row count."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def resolve(self, rows: int) -> tuple[int, ...]:
        """The shape with `rows` in place of the row dimension."""
        return tuple(rows if dim == ROWS else dim for dim in self.shape)


@attrs.frozen
class CacheLayout:
    """One cache object.

    Attributes:
        path: its index, dotted for members of a cache list.
        kind: which object of mlx-lm.
        window: rows that windowed layers keep.
        leaves: its tensors.
        bits: of a quantised cache's values.
        group_size: values that share a scale in a quantised cache.
        slots: arrays that an arrays cache has room for; those that are never set have
            no leaf.
        keep: first rows that a rotating cache never drops; they count as part of its
            window.
    """

    path: str
    kind: CacheKind
    window: int | None
    leaves: tuple[LeafSpec, ...]
    bits: int | None = None
    group_size: int | None = None
    slots: int | None = attrs.field(
        default=attrs.Factory(
            lambda self: len(self.leaves) if self.kind is CacheKind.ARRAYS else None,
            takes_self=True,
        )
    )
    keep: int = 0

    def rows(self, start: int, end: int) -> tuple[range, range]:
        """Positions of the rows that a blob of segment [start, end) holds, in order.

        Their number is `min(end - start, window)`. The last of them end at `end`, and
        are no more than a rotating cache has beside its first `keep` rows; the others
        are among these, the segment's own if it has any. So all are there when the
        segment ends, in decode too, and what a cache holds at position p are the rows
        of segment [0, p).
        """
        count = min(end - start, self.window or end - start)
        last = min(count, self.window - self.keep) if self.window else count
        first = min(start, self.keep - (count - last))
        return range(first, first + count - last), range(end - last, end)

    @property
    def layer_class(self) -> LayerClass:
        """Follows from the kind."""
        return CLASS_OF_KIND[self.kind]


@attrs.frozen(slots=False)
class StateLayout:
    """The cache objects of a model, in their order."""

    caches: tuple[CacheLayout, ...]

    def has(self, blob_class: BlobClass) -> bool:
        """Whether blobs of this class exist for the model at all."""
        return blob_class in self.blob_classes

    @cached_property
    def blob_classes(self) -> tuple[BlobClass, ...]:
        """The classes of blobs that this layout has, in the order kv, window, state."""
        present = {cache.layer_class for cache in self.caches}
        return tuple(c for c in BlobClass if c.layer_class in present)

    @cached_property
    def max_window(self) -> int:
        """Rows before a restore point that windowed layers need; 0 without any.

        Beside these they need rows [0, head).
        """
        rows = (c.window - c.keep for c in self.caches if c.window is not None)
        return max(rows, default=0)

    @cached_property
    def head(self) -> int:
        """First rows that some windowed layer never drops; 0 without any."""
        return max((cache.keep for cache in self.caches), default=0)

    @property
    def full_only(self) -> bool:
        """Whether every row is a restore point."""
        return self.blob_classes == (BlobClass.KV,)

    def blob(self, blob_class: BlobClass, rows: int) -> BlobLayout:
        """Derive a blob's header, tensors and size.

        Args:
            blob_class: which layers.
            rows: tokens in the segment (its end - start); of no account for `state`.
                Windowed layers keep `min(rows, window)`: see `CacheLayout.rows`.

        Raises:
            ArithmeticMismatchError: no rows, or the layout has no such layers.
            LimitExceededError: the blob would be larger than the format allows.
        """
        if blob_class is BlobClass.STATE:
            rows = 1
        if (found := self._derived.get((blob_class, rows))) is None:
            if rows < 1 or not self.has(blob_class):
                raise ArithmeticMismatchError("no such blob in this layout")
            found = BlobLayout.of(self.leaves(blob_class), rows)
            self._derived[blob_class, rows] = found
        return found

    def leaves(self, blob_class: BlobClass) -> tuple[Leaf, ...]:
        """The tensors of all blobs of this class, in order."""
        return self._leaves[blob_class]

    @cached_property
    def _derived(self) -> dict[tuple[BlobClass, int], BlobLayout]:
        return {}

    @cached_property
    def _leaves(self) -> dict[BlobClass, tuple[Leaf, ...]]:
        # Leaves without bytes are described by the layout, and stored nowhere.
        found: dict[BlobClass, list[Leaf]] = {name: [] for name in BlobClass}
        for blob_class in BlobClass:
            for c, cache in enumerate(self.caches):
                if cache.layer_class is not blob_class.layer_class:
                    continue
                for j, leaf in enumerate(cache.leaves):
                    name = f"{cache.path}.{leaf.name}"
                    if 0 not in leaf.shape:
                        found[blob_class].append(
                            Leaf(name, c, j, leaf.dtype, leaf.shape, cache.window)
                        )
        return {
            blob_class: tuple(sorted(leaves, key=lambda leaf: leaf.name))
            for blob_class, leaves in found.items()
        }

    def to_json(self) -> list[dict[str, Any]]:
        """The JSON form that manifests carry."""
        return [_cache_to_json(cache) for cache in self.caches]

    @classmethod
    def from_json(cls, value: object) -> "StateLayout":
        """Decode, refusing whatever is unknown, missing or out of range.

        Raises:
            FormatError: the value is not a layout.
            LimitExceededError: too many caches or leaves.
        """
        if not isinstance(value, list) or not value:
            raise FormatError("the layout is not a list")
        if len(value) > CACHES:
            raise LimitExceededError("the layout has too many caches")
        caches = tuple(_cache_from_json(item) for item in value)
        order = [tuple(map(int, cache.path.split("."))) for cache in caches]
        if order != sorted(set(order)):
            raise FormatError("the layout's caches are not in order")
        if any(path == other[: len(path)] for path, other in pairwise(order)):
            raise FormatError("a cache of the layout has members")
        return cls(caches)


def _cache_to_json(cache: CacheLayout) -> dict[str, Any]:
    value: dict[str, Any] = {
        "cache": cache.path,
        "class": cache.layer_class.value,
        "kind": cache.kind.value,
        "leaves": [
            {"dtype": leaf.dtype, "name": leaf.name, "shape": list(leaf.shape)}
            for leaf in cache.leaves
        ],
    }
    value |= {name: getattr(cache, name) for name in _NUMBERS[cache.kind]}
    return value


def _cache_from_json(value: object) -> CacheLayout:
    if not isinstance(value, dict) or value.get("kind") not in list(CacheKind):
        raise FormatError("a cache in the layout is of an unknown kind")
    kind = CacheKind(value["kind"])
    numbers = _NUMBERS[kind]
    data = take_exact(value, ["cache", "class", "kind", "leaves", *numbers])
    path = take(data, "cache", str)
    layer_class = CLASS_OF_KIND[kind]
    if data["class"] != layer_class.value or not _PATH.fullmatch(path):
        raise FormatError("a cache in the layout contradicts itself")
    found = {name: take(data, name, int) for name in numbers}
    least = {"keep": 0}
    if not all(least.get(name, 1) <= n < 1 << 31 for name, n in found.items()):
        raise FormatError("a number of a cache in the layout is out of range")
    if found.get("keep", 0) >= found.get("window", 1):
        raise FormatError("a cache in the layout keeps more than its window")
    leaves = take(data, "leaves", list)
    if max(len(leaves), found.get("slots", 0)) > LEAVES:
        raise LimitExceededError("a cache in the layout has too many leaves")
    if not leaves and kind is not CacheKind.ARRAYS:
        raise FormatError("a cache in the layout has no leaves")
    specs = tuple(_leaf_from_json(leaf, layer_class) for leaf in leaves)
    if len({spec.name for spec in specs}) != len(specs):
        raise FormatError("two leaves of a cache have one name")
    if len(specs) > found.get("slots", LEAVES):
        raise FormatError("a cache in the layout has more leaves than slots")
    fields: dict[str, Any] = {"window": None, **found}
    return CacheLayout(path=path, kind=kind, leaves=specs, **fields)


def _leaf_from_json(value: object, layer_class: LayerClass) -> LeafSpec:
    data = take_exact(value, ["dtype", "name", "shape"])
    name, dtype = take(data, "name", str), take(data, "dtype", str)
    shape = take(data, "shape", list)
    if not _LEAF.fullmatch(name) or dtype not in DTYPE_BYTES:
        raise FormatError("a leaf has an unknown name or dtype")
    if not 0 < len(shape) <= 8 or not all(_is_dimension(dim) for dim in shape):
        raise FormatError("a leaf's shape is out of range")
    if shape.count(ROWS) != (0 if layer_class is LayerClass.WHOLE else 1):
        raise FormatError("a leaf's row dimension does not fit its class")
    return LeafSpec(name, dtype, tuple(shape))


def _is_dimension(dim: object) -> bool:
    return type(dim) is int and (dim == ROWS or 0 <= dim < 1 << 31)


def row_axis(shape: Sequence[int]) -> int:
    """Index of the row dimension in a leaf's shape."""
    return tuple(shape).index(ROWS)
