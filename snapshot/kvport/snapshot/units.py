"""Sizes and durations as people write them: `1.5GB`, `8GiB`, `90s`, `12h`, `30d`.

In: text. Out: whole bytes or seconds, at least one; and sizes for people to read.
"""

import re
from typing import Final

_SIZE: Final = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([KMGT]?)(i?)(B?)", re.ASCII | re.IGNORECASE
)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_DURATION: Final = re.compile(r"([0-9]{1,12}) ?([smhdw]?)", re.ASCII)
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(text: str) -> int:
    """Bytes; `8G` is `8GiB`, and `8GB` is a bit less.

    Raises:
        ValueError: another form, or less than one byte.
    """
    if (form := _SIZE.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r} is not a size such as 500MB or 8GiB")
    number, unit, binary, byte = form.groups()
    decimal = byte and not binary
    size = int(float(number) * (1000 if decimal else 1024) ** _POWERS[unit.upper()])
    if size < 1:
        raise ValueError("a size is at least one byte")
    return size


def parse_seconds(text: str) -> int:
    """Seconds of a duration; without a unit these are seconds already.

    Raises:
        ValueError: another form, or less than one second.
    """
    if (form := _DURATION.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r} is not a duration such as 90s, 12h or 30d")
    seconds = int(form[1]) * _SECONDS[form[2]]
    if seconds < 1:
        raise ValueError("a duration is at least one second")
    return seconds


def format_bytes(size: int) -> str:
    """A size for people, in binary units."""
    value, unit = float(size), "B"
    for larger in _UNITS:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def format_seconds(seconds: int) -> str:
    """A duration as it is said to commands: in the largest whole unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
