"""The files below the root: blobs written once, directories, staging.

In: bytes. Out: allocated sizes, bytes. A file is a blob and behind it a trailer, which
the blob's digest and its readers know nothing of. Nothing here knows of rows: who calls
decides what is to be written, and makes it durable before it becomes visible.

Files are flushed as far as the drive, one by one; the flush of their directories then
empties the drive's own cache, once for all of them (see `kvport.snapshot.durable`).
"""

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import structlog

from kvport.manifest.digests import BlobDigest
from kvport.snapshot.cache.blob_stream import BlobStream, UnfitFileError, read_some
from kvport.snapshot.cache.directories import (
    allocated,
    is_directory,
    names_in,
    opened,
    remove_below,
    tree_allocated,
)
from kvport.snapshot.cache.overhead import Overhead
from kvport.snapshot.cache.records import BlobRef, Bytes, is_namespace_id
from kvport.snapshot.cache.regular import (
    create,
    open_regular,
    write_all,
)
from kvport.snapshot.durable import fsync_file
from kvport.snapshot.errors import DiskFullError, StorageError

_log = structlog.get_logger(__name__)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_SECTOR: Final = 512
"""Unit of `st_blocks`, whatever the file system's block."""
_DIGEST: Final = 32


@attrs.frozen
class WrittenFile:
    """A blob with its trailer under a temporary name, flushed, not yet renamed."""

    temporary: Path
    final: Path
    alloc: int


class Files:
    """Paths below one root, and what is done with them."""

    def __init__(self, root: Path, check_root: Callable[[], None]) -> None:
        """Files of a root.

        Args:
            root: its directory.
            check_root: raises where the path does not lead to the root any more.
        """
        self.root: Final = root
        self._check_claim: Final = check_root
        self.namespaces: Final = root / "ns"
        self.staging: Final = root / "staging"
        self._overhead: Final = Overhead(root, self.namespaces, self.staging)
        self._left: set[Path] = set()
        self._left_lock = threading.Lock()

    def check_root(self) -> None:
        """See that the root, and the directories in it, are what they were.

        To be called before each change, by whoever holds the lock for it: nothing may
        be written or removed in what took their place.

        Raises:
            CacheAbsentError: the path does not lead to the root any more.
            StorageError: something else stands in the place of a directory, or the
                volume does not say.
        """
        self._check_claim()
        with storage_io():
            device = self.root.stat().st_dev
            for path in (self.namespaces, self.staging):
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    if not stat.S_ISDIR(found.st_mode) or found.st_dev != device:
                        raise StorageError("a directory of the cache was exchanged")

    def namespace(self, namespace_id: str) -> Path:
        """Directory of a namespace's blobs.

        Raises:
            StorageError: the id is none: it might lead anywhere.
        """
        if not is_namespace_id(namespace_id):
            raise StorageError("the index names a namespace that cannot be")
        return self.namespaces / namespace_id

    def blob(self, namespace_id: str, digest: BlobDigest) -> Path:
        """Where a blob lives.

        Raises:
            StorageError: the id or the digest is none.
        """
        if len(digest) != _DIGEST:
            raise StorageError("the index names a blob that cannot be")
        return self.namespace(namespace_id) / digest.hex()

    def make_directory(self, path: Path) -> None:
        """Make a directory of mode 0700, durably, unless it is there.

        Anything else that has its name goes, a link to a directory too.
        """
        if path.parent == self.root:
            self._check_claim()
        else:
            self.check_root()
        with storage_io(), self._overhead.changing(path):
            self._remove_left(path)
            if not is_directory(path):
                remove_below(self.root, path)
                with opened(self.root, path.parent) as parent:
                    os.mkdir(path.name, 0o700, dir_fd=parent)
                    fsync_file(parent)

    def write(
        self, namespace_id: str, digest: BlobDigest, buffers: Sequence[Bytes]
    ) -> WrittenFile:
        """Write and flush a blob, and its trailer, under a temporary name.

        Raises:
            OSError: nothing is left of it, or it counts as left.
        """
        final = self.blob(namespace_id, digest)
        temporary = final.with_name(f"{final.name}.{secrets.token_hex(4)}")
        with self._overhead.changing(temporary):
            fd = create(self.root, temporary)
        try:
            write_all(fd, buffers)
            os.fsync(fd)
            alloc = os.fstat(fd).st_blocks * _SECTOR
        except BaseException:
            self.remove(temporary)
            raise
        finally:
            os.close(fd)
        return WrittenFile(temporary, final, alloc)

    def read(self, namespace_id: str, ref: BlobRef) -> bytearray:
        """The whole blob, without its trailer.

        Raises:
            FileNotFoundError: it has no file.
            UnfitFileError: it is no file of this size, or the medium lost its bytes.
            OSError: it cannot be read now.
        """
        with self.open(namespace_id, ref) as file:
            data = bytearray(ref.size)
            view, done = memoryview(data), 0
            while done < ref.size:
                done += read_some(file, view[done:])
            return data

    def open(self, namespace_id: str, ref: BlobRef) -> BlobStream:
        """The blob as an unbuffered stream, without its trailer.

        Raises:
            FileNotFoundError: it has no file.
            UnfitFileError: it is no file of this size.
            OSError: it cannot be opened now.
        """
        with contextlib.ExitStack() as undo:
            path = self.blob(namespace_id, ref.digest)
            file = undo.enter_context(open_regular(path))
            if os.fstat(file.fileno()).st_size != ref.size + ref.trailer:
                raise UnfitFileError("a blob has another size than its row")
            undo.pop_all()
        return BlobStream(file, ref.size)

    def trailer(self, namespace_id: str, ref: BlobRef) -> bytes:
        """What follows the blob in its file; errors as of `read`."""
        with open_regular(self.blob(namespace_id, ref.digest)) as file:
            if os.fstat(file.fileno()).st_size != ref.size + ref.trailer:
                raise UnfitFileError("a blob has another size than its row")
            return os.pread(file.fileno(), ref.trailer, ref.size)

    def blobs(self, namespace_id: str) -> Iterator[Path]:
        """Whatever lies in a namespace's directory; nothing if it is not there."""
        directory = self.namespace(namespace_id)
        for name in names_in(self.root, directory):
            yield directory / name

    def staged(self) -> list[Path]:
        """Whatever lies in `staging`."""
        return [self.staging / name for name in names_in(self.root, self.staging)]

    def staged_bytes(self) -> int:
        """Allocated bytes of the files of all uploads, measured; some may go."""
        total = 0
        for upload in set(self.staged()) - self._overhead.foreign:
            for name in names_in(self.root, upload):
                with contextlib.suppress(OSError):
                    total += allocated(upload / name)
        return total

    @property
    def foreign_bytes(self) -> int:
        """Allocated bytes of what is not the cache's, as of the last look at it."""
        return self._overhead.foreign_bytes

    def overhead_bytes(self, foreign: Iterable[Path] | None = None) -> int:
        """Allocated bytes of overhead, and of what is left, which is tried again.

        Args:
            foreign: as of `Overhead.measure`.

        Raises:
            OSError: something could not be looked at.
            StorageError: the root is not there, or not what it was.
        """
        self.check_root()
        left = sum(map(self._left_bytes, list(self._left)))
        if foreign is not None:
            foreign = set(foreign) - self._left
        return self._overhead.measure(foreign) + left

    # What a volume refuses to remove.

    def remove(self, path: Path) -> bool:
        """Remove a file or directory that nothing speaks of; False if it is left.

        What is left counts as overhead for as long as it is there; at the top of the
        root, it does so anyway.
        """
        try:
            self.check_root()
            self.unlink(path)
        except (OSError, StorageError) as error:
            _log.warning("cache_file_left", errno=getattr(error, "errno", None))
            if path.parent != self.root:
                with self._left_lock:
                    self._left.add(path)
            return False
        return True

    def unlink(self, path: Path) -> None:
        """Remove a file or directory; see `remove_below`."""
        with self._overhead.changing(path):
            remove_below(self.root, path)

    def publish(self, temporary: Path, final: Path) -> None:
        """Give a file its name; whatever had it goes, a directory too.

        Raises:
            OSError: the file is where it was.
        """
        with self._left_lock:
            with (
                self._overhead.changing(temporary, final),
                opened(self.root, temporary.parent) as old,
                opened(self.root, final.parent) as new,
            ):
                rename = functools.partial(
                    os.rename,
                    temporary.name,
                    final.name,
                    src_dir_fd=old,
                    dst_dir_fd=new,
                )
                try:
                    rename()
                except IsADirectoryError:
                    remove_below(self.root, final)
                    rename()
            self._left.discard(final)

    def _remove_left(self, path: Path) -> None:
        with self._left_lock:
            if path in self._left:
                self.check_root()
                self.unlink(path)
                self._left.discard(path)

    def _left_bytes(self, path: Path) -> int:
        with contextlib.suppress(OSError, StorageError):
            self._remove_left(path)
        with contextlib.suppress(FileNotFoundError):
            whole = tree_allocated(path)
            # Directories of namespaces and uploads are counted with all others.
            counted = path.parent in (self.namespaces, self.staging)
            return whole - allocated(path) * (counted and is_directory(path))
        return 0


def is_full(error: OSError) -> bool:
    """Whether the volume, or our share of it, has no space left."""
    return error.errno in _FULL


@contextlib.contextmanager
def storage_io() -> Iterator[None]:
    """Say the file system's errors in our words.

    Raises:
        DiskFullError: no space is left.
        StorageError: anything else.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFullError("the volume is full") from error
        raise StorageError("the volume refused a change") from error
