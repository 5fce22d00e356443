"""A blob as a stream: the first bytes of a file, without the trailer behind them."""

import io
from io import FileIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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
