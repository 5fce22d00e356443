"""Artifacts that a node knows: exports that it keeps, and what it admitted.

Neither holds its state: an artifact whose path was removed since is *gone*, and so is
one whose prefix cannot be restored to its end any more.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.keys import PublicKey
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.errors import (
    ArtifactGoneError,
    ArtifactUnknownError,
    CacheAbsentError,
    GoneError,
)
from kvport.snapshot.transfer.exporter import Export, reopen_export
from kvport.snapshot.transfer.issue import restorable
from kvport.snapshot.transfer.ledger import ArtifactRecord, Direction, Ledger
from kvport.snapshot.volume import Volume


@attrs.frozen
class Known:
    """An artifact, and whether its state is still stored."""

    record: ArtifactRecord
    stored: bool


class Artifacts:
    """One scope's artifacts."""

    def __init__(
        self,
        *,
        volume: Volume,
        ledger: Ledger,
        scope: str,
        key: PublicKey,
        sealing_secret: bytes,
        now: Callable[[], datetime],
    ) -> None:
        self._volume: Final = volume
        self._ledger: Final = ledger
        self._scope: Final = scope
        self._key: Final = key
        self._sealing_secret: Final = sealing_secret
        self._now = now

    def keep(self, export: Export) -> None:
        """Make it possible to open an export again, until it expires or is evicted.

        Raises:
            StorageError: the ledger could not be written.
        """
        export.keep(self._ledger, self._now())

    def reopen(self, artifact: ArtifactId) -> Export:
        """A kept export, opened again.

        Raises:
            ArtifactUnknownError: it was not kept.
            ArtifactGoneError: its state was removed since.
            ExpiredError: nobody could import it any more.
            CacheAbsentError: there is no cache at present.
        """
        with self._volume.using() as cache:
            return reopen_export(
                cache,
                self._ledger,
                artifact,
                scope=self._scope,
                key=self._key,
                sealing_secret=self._sealing_secret,
                now=self._now(),
            )

    def find(self, artifact: ArtifactId) -> ArtifactRecord:
        """What is known of one artifact whose state is stored.

        Raises:
            ArtifactUnknownError: it was neither kept nor admitted here.
            ArtifactGoneError: its state was removed since.
            CacheAbsentError: there is no cache at present.
        """
        record = self._record(artifact)
        self._path(record)
        return record

    def all(self) -> list[Known]:
        """All of them, newest first; none is stored while there is no cache."""
        records = self._ledger.artifacts(self._scope)
        try:
            with self._volume.using() as cache:
                return known(cache, self._ledger, records)
        except CacheAbsentError:
            return [Known(record, stored=False) for record in records]

    def nodes(self, artifact: ArtifactId) -> frozenset[NodeId]:
        """The path of an artifact, to restrict a lookup to.

        Raises:
            ArtifactUnknownError: it was neither kept nor admitted here.
            ArtifactGoneError: its state was removed since.
            CacheAbsentError: there is no cache at present.
        """
        return self._path(self._record(artifact))

    def _record(self, artifact: ArtifactId) -> ArtifactRecord:
        for direction in (Direction.ADMITTED, Direction.EXPORTED):
            record = self._ledger.find(artifact, direction, scope=self._scope)
            if record is not None:
                return record
        raise ArtifactUnknownError("no artifact of this id is known here")

    def _path(self, record: ArtifactRecord) -> frozenset[NodeId]:
        with self._volume.using() as cache:
            return _path(cache, self._ledger, record)


def known(
    cache: Cache, ledger: Ledger, records: Iterable[ArtifactRecord]
) -> list[Known]:
    """These artifacts, and whether their state is still stored.

    Raises:
        StorageError: the ledger or the index could not be read.
    """

    def is_stored(record: ArtifactRecord) -> bool:
        try:
            _path(cache, ledger, record)
        except ArtifactGoneError:
            return False
        return True

    return [Known(record, stored=is_stored(record)) for record in records]


def _path(cache: Cache, ledger: Ledger, record: ArtifactRecord) -> frozenset[NodeId]:
    try:
        namespace = ledger.namespace(record)
        path = cache.path(namespace, record.tip)
    except GoneError as error:
        raise ArtifactGoneError("the artifact's state was removed") from error
    if not restorable(namespace.layout, path)[-1]:
        raise ArtifactGoneError("the artifact's last point was removed")
    return frozenset(one.id for one in path)
