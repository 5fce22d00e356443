"""What an import of a file would run into on this machine, as far as it can be told.

In: an inspected file and a home. Out: facts. Nothing but the envelope is read, and no
model is loaded: a model is known here if it was served on this home before.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from kvport.manifest.errors import KvportError
from kvport.manifest.model import Manifest
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.verify import open_artifact
from kvport.snapshot.errors import KeyFileError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.known_models import KnownModels
from kvport.snapshot.transfer.archive import Inspection


@attrs.frozen
class Here:
    """How a file fits a home.

    Attributes:
        refusal: why its envelope would be refused, as (code, message); None if it is
            believed.
        readable: whether what is sealed is sealed for this home; True if it is not.
        models: by name of a model that was served here, the fields that differ.
    """

    refusal: tuple[str, str] | None
    readable: bool
    models: dict[str, list[str]]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        code, message = self.refusal or ("", "")
        return {
            "believed": self.refusal is None,
            "code": code,
            "reason": message,
            "readable": self.readable,
            "mismatched_fields": self.models,
        }

    def facts(self) -> list[tuple[str, str]]:
        """For people."""
        if not self.readable:
            told = "sealed for others"
        elif self.refusal is None:
            told = "believed"
        else:
            told = f"refused: {self.refusal[1]} ({self.refusal[0]})"
        facts = [("here", told)]
        for name, fields in self.models.items():
            fit = f"does not fit: {', '.join(fields)}" if fields else "fits"
            facts.append((f"model {name}", fit))
        return facts


def how_it_fits(inspection: Inspection, home: Path) -> Here | None:
    """How a file fits a home; None if that is no home yet.

    Raises:
        KeyFileError: the home's trust list is not fit for use.
    """
    keyring = Keyring(home)
    try:
        own = keyring.signing_key().public.key_id
        recipient = keyring.recipient_key().public
    except KeyFileError:
        return None
    refusal, readable = None, True
    try:
        opened = open_artifact(
            inspection.envelope,
            trust=keyring.load_trust(),
            now=datetime.now(UTC),
            own_key=own,
        )
    except KvportError as error:
        refusal = (error.code, error.message)
    else:
        readable = not isinstance(opened, SealedArtifact) or opened.is_for(recipient)
    return Here(refusal, readable, _fit(inspection, home, keyring))


def _fit(inspection: Inspection, home: Path, keyring: Keyring) -> dict[str, list[str]]:
    """The fields that differ by model: of those that fit best."""
    manifest = inspection.manifest
    if not isinstance(manifest, Manifest):
        return {}
    accepted = keyring.load_equivalences()
    found = {
        model.model: attrs.evolve(model, equivalences=accepted).mismatched_fields(
            manifest
        )
        for model in KnownModels(home).all()
    }
    fewest = min(map(len, found.values()), default=0)
    return {name: fields for name, fields in found.items() if len(fields) == fewest}
