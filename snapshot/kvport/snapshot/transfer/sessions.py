"""Sessions in the ledger: how far each went out, and how far it has come in.

In: a label, or a signed session. Out: the next sequence, which nobody gets twice; or a
refusal of what is older than what was taken. High-water marks are per issuer, scope and
session, and outlive the state that they are about.
"""

from collections.abc import Callable
from typing import Any, Final

import attrs

from kvport.manifest.digests import ArtifactId
from kvport.manifest.errors import RollbackError
from kvport.manifest.identity import KeyId
from kvport.manifest.model import Manifest

Run = Callable[[str, tuple[Any, ...]], list[Any]]
"""Rows of one statement."""

TABLES: Final = """
CREATE TABLE sent (
    scope TEXT NOT NULL, session TEXT NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (scope, session)
) WITHOUT ROWID;
CREATE TABLE seen (
    issuer TEXT NOT NULL, scope TEXT NOT NULL, session TEXT NOT NULL,
    sequence INTEGER NOT NULL, artifact TEXT NOT NULL,
    PRIMARY KEY (issuer, scope, session)
) WITHOUT ROWID;
"""

_SENT: Final = "SELECT sequence FROM sent WHERE scope = ? AND session = ?"
_SEND: Final = "INSERT OR REPLACE INTO sent (sequence, scope, session) VALUES (?, ?, ?)"
_SEEN: Final = """
SELECT sequence, artifact FROM seen WHERE issuer = ? AND scope = ? AND session = ?"""
_SEE: Final = """
INSERT OR REPLACE INTO seen (issuer, scope, session, sequence, artifact)
VALUES (?, ?, ?, ?, ?)"""


@attrs.frozen
class Mark:
    """How far an artifact's session has come.

    Attributes:
        issuer: key that issued it.
        scope: as signed.
        session: label; empty for none, and then nothing is held to it.
        sequence: of the artifact.
        artifact: its id.
    """

    issuer: KeyId
    scope: str
    session: str
    sequence: int
    artifact: ArtifactId

    @classmethod
    def of(cls, manifest: Manifest, artifact: ArtifactId) -> "Mark":
        """From the manifest of an artifact."""
        terms, session = manifest.terms, manifest.session
        return cls(
            terms.issuer.key_id, terms.scope, session.id, session.sequence, artifact
        )


def next_sequence(run: Run, scope: str, session: str) -> int:
    """Count one more artifact of a session that goes out; in a transaction."""
    rows = run(_SENT, (scope, session))
    sequence = int(rows[0][0]) + 1 if rows else 1
    run(_SEND, (sequence, scope, session))
    return sequence


def check_mark(run: Run, mark: Mark) -> None:
    """See that an artifact is not older than what was taken of its session.

    Raises:
        RollbackError: it is, or another one has its sequence.
    """
    if not mark.session:
        return
    for sequence, artifact in run(_SEEN, (mark.issuer, mark.scope, mark.session)):
        if mark.sequence < sequence:
            raise RollbackError(
                f"artifact {mark.sequence} of the session is older than {sequence},"
                " which was imported before"
            )
        if mark.sequence == sequence and mark.artifact != artifact:
            raise RollbackError(
                f"another artifact {sequence} of the session was imported before"
            )


def raise_mark(run: Run, mark: Mark) -> None:
    """Remember an artifact that is being admitted; in a transaction, once checked."""
    if mark.session:
        run(_SEE, attrs.astuple(mark))
