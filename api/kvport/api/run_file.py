"""`<home>/run.json`: where the server of a home listens, for the command line.

* Written when the server is ready, removed when it ends; 0600, whole or not at all.
* Alone it proves nothing, since a server may have died: whoever reads it also asks
  whether the home is locked, and whether what listens is the home's own server.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from blake3 import blake3

from kvport.manifest.identity import KeyId
from kvport.snapshot.durable import write_atomic

_NAME = "run.json"


class RunInfo(msgspec.Struct, frozen=True):
    """A running server.

    Attributes:
        pid: its process.
        port: TCP port.
        url: its address, without a slash at the end.
        started: RFC 3339, UTC.
    """

    pid: int
    port: int
    url: str
    started: str


@contextlib.contextmanager
def announced(home: Path, url: str, port: int) -> Iterator[None]:
    """Announce this process as the home's server, as long as the block runs."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    info = RunInfo(pid=os.getpid(), port=port, url=url, started=started)
    write_atomic(home / _NAME, msgspec.json.encode(info), 0o600)
    try:
        yield
    finally:
        (home / _NAME).unlink(missing_ok=True)


def running(home: Path) -> RunInfo | None:
    """The server that the home's owner announced; None if there is no owner."""
    if not is_locked(home):
        return None
    try:
        return msgspec.json.decode((home / _NAME).read_bytes(), type=RunInfo)
    except (OSError, msgspec.DecodeError):
        return None


def fingerprint(key_id: KeyId) -> str:
    """What a server shows of its home before it is shown a key: 64 hex digits."""
    return blake3(key_id.encode("ascii")).hexdigest()


def is_locked(home: Path) -> bool:
    """Whether a process owns the home."""
    try:
        descriptor = os.open(home / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who ask at once do not see each other as the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
