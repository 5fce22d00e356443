"""A sealed artifact whose one blob is a message of three chunks."""

from collections.abc import Callable

from kvport.manifest.layout import CacheKind, CacheLayout, LeafSpec, StateLayout
from tests.manifest.builder import ManifestBuilder
from tests.vectors.sealed_making import FixedBuilder

_LEAVES = (LeafSpec("k", "F32", (1, -1, 2560)),)
LARGE = FixedBuilder(
    plain=ManifestBuilder(
        layout=StateLayout((CacheLayout("0", CacheKind.KV, None, _LEAVES),)),
        tokens=(1, 2, 3, 4),
        cuts=(),
        points={},
    )
)


def large_messages(change: Callable[[bytes], bytes]) -> list[bytes]:
    """Its messages, the blob's changed."""
    private, tokens, blob = LARGE.messages()
    return [private, tokens, change(blob)]
