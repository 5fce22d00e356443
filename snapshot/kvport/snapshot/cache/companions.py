"""What stands beside the index, and in its place: looked at before SQLite opens it.

In: the index's path. Out: SQLite meets no file but its own. It opens what it finds
under the names that it knows, follows links, and writes: to the database, to its log,
and to whatever else a journal says.

* A journal is never ours: the index keeps a log from its first page on. One that
  somebody put there would be played back, and names a file that SQLite then removes.
* A log that is no file of ours, or has another name too, is removed, and the index
  judged without it, as after a log that was lost.
* A database that has another name too, as in a copy that a backup made of links, is
  replaced by a real copy.
"""

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

import structlog

from kvport.manifest.limits import MIB
from kvport.snapshot.cache.blob_stream import UnfitFileError
from kvport.snapshot.cache.directories import remove_tree
from kvport.snapshot.cache.regular import (
    create,
    is_own,
    open_regular,
)
from kvport.snapshot.durable import fsync_directory
from kvport.snapshot.errors import StorageError

_LOG: Final = "-wal"
_JOURNAL: Final = "-journal"
_SHARED: Final = "-shm"
_SUSPECT: Final = "-suspect"
_MAGIC: Final = b"SQLite format 3\0"

_log = structlog.get_logger(__name__)


def log_of(path: Path) -> Path:
    """SQLite's log of an index."""
    return path.with_name(path.name + _LOG)


def remove_all(path: Path) -> None:
    """Remove an index, and all that SQLite keeps beside it.

    Raises:
        OSError: the volume refused.
    """
    for suffix in ("", _LOG, _JOURNAL, _SHARED):
        remove_tree(path.with_name(path.name + suffix))


def make_fit(path: Path) -> bool:
    """Leave SQLite nothing but files of ours; whether it may miss one now.

    Raises:
        UnfitFileError: the index itself is none, and no index either.
        FileNotFoundError: it is not there.
        OSError: the volume refused.
    """
    found = False
    for suffix in (_LOG, _JOURNAL, _SHARED):
        beside = path.with_name(path.name + suffix)
        if not os.path.lexists(beside):
            continue
        if suffix != _JOURNAL and is_own(path.parent, beside):
            continue
        _log.warning("cache_index_companion_removed", name=beside.name)
        remove_tree(beside)
        found = True
    if not is_own(path.parent, path):
        _log.warning("cache_index_copied")
        _copy(path)
        found = True
    return found


def check_fit(path: Path) -> None:
    """See that what SQLite has opened are files of ours only.

    Raises:
        StorageError: something else came there since the look before.
        OSError: the volume does not say.
    """
    there = [one for one in (path, log_of(path)) if os.path.lexists(one)]
    if not all(is_own(path.parent, one) for one in there):
        raise StorageError("the index was exchanged while it was opened")


# The mark.


def is_suspect(path: Path) -> bool:
    """Whether an index was found corrupt while it was in use."""
    return os.path.lexists(_mark(path))


def suspect(path: Path) -> None:
    """Have the next start read all of an index.

    Raises:
        OSError: the volume refused.
    """
    with contextlib.suppress(FileExistsError):
        os.close(create(path.parent, _mark(path)))


def clear_suspicion(path: Path) -> None:
    """An index was read as a whole, or is new.

    Raises:
        OSError: the volume refused.
    """
    if is_suspect(path):
        remove_tree(_mark(path))


def _mark(path: Path) -> Path:
    return path.with_name(path.name + _SUSPECT)


def _copy(path: Path) -> None:
    """Put a copy in the place of a database that has another name."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open_regular(path) as source:
        size = os.fstat(source.fileno()).st_size
        volume = os.statvfs(path.parent)
        if source.read(len(_MAGIC)) != _MAGIC:
            raise UnfitFileError("not an index")
        if size > volume.f_bavail * volume.f_frsize // 2:
            raise UnfitFileError("too large for an index")
        source.seek(0)
        try:
            with os.fdopen(create(path.parent, temporary), "wb") as target:
                shutil.copyfileobj(source, target, MIB)
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
