"""Models that were served here: what an artifact must fit, also while none is loaded.

In: each model that is loaded. Out: the same for `kvport inspect`, without mlx. What is
lost of it is known again after the next load.
"""

import contextlib
from pathlib import Path
from typing import Final

import structlog

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.errors import KvportError
from kvport.manifest.signed import Local
from kvport.snapshot.remembered import Remembered

log = structlog.get_logger(__name__)


class KnownModels:
    """One home's models by the name under which each was served last."""

    def __init__(self, home: Path) -> None:
        """Read the home's file."""
        self._facts: Final = Remembered(home / "known-models.json")

    def add(self, model: Local) -> None:
        """A model was loaded; never raises, since it is served all the same."""
        try:
            self._facts.put(model.model, canonical_dumps(model.to_json()).decode())
        except (OSError, KvportError) as error:
            log.warning("known_model_lost", model=model.model, error=str(error))

    def all(self) -> list[Local]:
        """Those that are known."""
        found = []
        for name in self._facts.names():
            # One that cannot be read is not known.
            with contextlib.suppress(KvportError):
                text = (self._facts.get(name) or "").encode()
                found.append(Local.from_json(strict_loads(text)))
        return found
