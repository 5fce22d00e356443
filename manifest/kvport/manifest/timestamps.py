"""Times in signed documents: RFC 3339 in UTC, whole seconds, one spelling each."""

import re
from datetime import UTC, datetime
from typing import Final

from kvport.manifest.errors import FormatError

ALWAYS: Final = (
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
)
"""The widest window that can be written."""

_FORM: Final = re.compile(
    # Later Pythons take 24:00:00 for the next day's midnight.
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?!24)[0-9]{2}:[0-9]{2}:[0-9]{2}Z",
    re.ASCII,
)


def format_time(time: datetime) -> str:
    """`YYYY-MM-DDTHH:MM:SSZ`; fractions of a second are cut off.

    Args:
        time: aware, of any zone.
    """
    utc = time.astimezone(UTC)
    return utc.replace(microsecond=0, tzinfo=None).isoformat() + "Z"


def parse_time(text: str) -> datetime:
    """Inverse of `format_time`; the result is aware.

    Raises:
        FormatError: any other spelling, or no such date.
    """
    if not _FORM.fullmatch(text):
        raise FormatError("a time is not YYYY-MM-DDTHH:MM:SSZ")
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise FormatError("a time does not exist") from error
