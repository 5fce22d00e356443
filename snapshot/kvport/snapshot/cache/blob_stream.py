"""A blob as a stream: the first bytes of a file, without the trailer behind them.

In: an open file and a size. Out: its bytes, or that they cannot be had.
"""

import errno
import io
from io import FileIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class UnfitFileError(Exception):
    """What stands in a file's place is no such file, or does not give its bytes."""


class BlobStream(io.RawIOBase):
    """The first bytes of a file: what lies behind the blob is not given out."""

    def __init__(self, file: FileIO, size: int) -> None:
        """Take over a file that stands at its start."""
        super().__init__()
        self._file = file
        self._left = size

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill a buffer, or some of it; 0 at the end."""
        view = memoryview(buffer).cast("B")[: self._left]
        count = self._file.readinto(view) or 0
        self._left -= count
        return count

    def close(self) -> None:
        """Close the file; again does nothing."""
        self._file.close()
        super().close()


def read_some(file: BlobStream, buffer: memoryview) -> int:
    """Read some bytes of a blob that has more; answers how many.

    Raises:
        UnfitFileError: the medium lost its bytes.
    """
    try:
        count = file.readinto(buffer)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise UnfitFileError("a blob cannot be read") from error
    if not count:
        raise UnfitFileError("a blob ended early")
    return count
