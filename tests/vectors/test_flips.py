"""No bit of an artifact can be another: plain, sealed, opened and not."""

from contextlib import suppress

import attrs
import pytest

from kvport.manifest.errors import KvportError
from tests.vectors.case import ROOT, read
from tests.vectors.judging import examine

NAMES = ("one-token", "encoded-by-zstd", "sealed", "sealed-unopened")
FRAME_AND_END = 512 + 1024


def refuse_flips(name: str, bits: range) -> None:
    """Each flip is refused.

    A frame of zstd may have bits that decode to nothing: with them flipped, just what
    was signed must come out.
    """
    case = read(ROOT / "valid" / name)
    data = bytearray(case.container)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        flipped = attrs.evolve(case, container=bytes(data))
        data[bit // 8] ^= 1 << bit % 8
        if name == "encoded-by-zstd" and bit // 8 >= len(data) - FRAME_AND_END:
            with suppress(KvportError):
                assert examine(flipped) == examine(case)
        else:
            with pytest.raises(KvportError):
                examine(flipped)


@pytest.mark.parametrize("name", NAMES)
def test_flips_anywhere(name):
    """Each 211th bit: no divisor of 512 * 8, so that bits of all weights are hit."""
    size = len(read(ROOT / "valid" / name).container)
    refuse_flips(name, range(0, size * 8, 211))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_every_flip(name):
    size = len(read(ROOT / "valid" / name).container)
    refuse_flips(name, range(size * 8))
