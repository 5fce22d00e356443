"""Token ids as bytes, and key(p): the name of an exact prefix.

With `KDF(domain, bytes)` = BLAKE3 derive_key, block size B, state identity digest I:

    h_0    = KDF(key-root, u32le(B) || I)
    h_i    = KDF(key, h_{i-1} || u32le(B) || ids of block i)
    key(p) = h_i                                          for p = B*i
    key(p) = KDF(key, h_i || u32le(r) || r ids)           for p = B*i + r, 0 < r < B

A key depends on state identity, block size and token ids only, never on how storage is
cut. The length before the ids separates a short last block from a full one.
"""

import copy
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvport.manifest.digests import Key, derive
from kvport.manifest.domains import Domain
from kvport.manifest.errors import FormatError

TOKEN_SIZE: Final = 4
BLOCK_SIZE: Final = 256
"""Default tokens in a block."""


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian, 4 bytes each.

    Raises:
        FormatError: an id is not an integer in 0..2**32-1.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise FormatError("a token id is not an unsigned 32-bit integer") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_tokens(data: bytes) -> Sequence[int]:
    """Inverse of `encode_tokens`, for a token entry that was verified."""
    return [number for (number,) in struct.iter_unpack("<I", data)]


class KeyChain:
    """key(p) along one sequence, hashing every full block once."""

    def __init__(self, identity: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._full = struct.pack("<I", block_size)
        self._chain = [derive(Domain.KEY_ROOT, self._full + identity)]  # h_0, h_1, ...

    def key(self, tokens: bytes | bytearray, end: int) -> Key:
        """The key of the first `end` of these encoded ids.

        Ids of blocks that were hashed must be those of earlier calls.

        Raises:
            ValueError: `end` is not within the tokens.
        """
        if not 0 <= end * TOKEN_SIZE <= len(tokens):
            raise ValueError("a position must lie within the tokens")
        blocks, rest = divmod(end, self._block_size)
        step = self._block_size * TOKEN_SIZE
        for block in range(len(self._chain) - 1, blocks):
            ids = tokens[block * step : (block + 1) * step]
            self._chain.append(derive(Domain.KEY, self._chain[-1] + self._full + ids))
        above = self._chain[blocks]
        if not rest:
            return Key(above)
        ids = tokens[blocks * step : end * TOKEN_SIZE]
        return Key(derive(Domain.KEY, above + struct.pack("<I", rest) + ids))

    def fork(self, start: int) -> "KeyChain":
        """A chain for other ids from `start` on, with the blocks before as hashed."""
        other = copy.copy(self)
        other.forget(start)
        return other

    def forget(self, start: int) -> None:
        """Let ids from `start` on be others."""
        self._chain = self._chain[: start // self._block_size + 1]


def prefix_keys(
    identity: bytes, block_size: int, tokens: bytes, ends: Iterable[int]
) -> list[Key]:
    """key(p) for each p of `ends`.

    Args:
        identity: digest of the state identity, 32 bytes.
        block_size: tokens in a block.
        tokens: encoded token ids of the prefix (`encode_tokens`).
        ends: positions, ascending, each at most the number of tokens.

    Raises:
        ValueError: `ends` is not ascending, or goes beyond the tokens.
    """
    chain, last, keys = KeyChain(identity, block_size), 0, []
    for end in ends:
        if end < last or end * TOKEN_SIZE > len(tokens):
            raise ValueError("positions must ascend and stay within the tokens")
        keys.append(chain.key(tokens, end))
        last = end
    return keys
