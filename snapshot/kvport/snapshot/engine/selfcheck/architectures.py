"""Selfcheck of every architecture that we can build a tiny model of."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from kvport.manifest.errors import KvportError
from kvport.snapshot.engine.builder import ARCHITECTURES, build_model
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.selfcheck.report import Report
from kvport.snapshot.engine.selfcheck.run import STEPS, selfcheck

CHUNK: Final = 64
"""Chunk, stride and block: the tiny models' windows are 48 rows, 64 at most."""
TOKENS: Final = 172
"""Longest prompt: windows are passed in prefill, chunk and block ends in the reply."""

_NO_FIGURES: Final[dict[str, Any]] = {
    "alone": None, "max_diff_to_hot": None, "max_diff_to_cold": None, "cases": [],
}  # fmt: skip


@attrs.frozen(kw_only=True)
class ArchitectureReport:
    """What a selfcheck found of one architecture.

    Attributes:
        name: of the architecture, as the builder knows it.
        caches: what its layers' caches are, in words.
        refused: why it could not be checked, or None.
        report: of the check, None if it was refused.
    """

    name: str
    caches: str
    refused: str | None = None
    report: Report | None = None

    @property
    def passed(self) -> bool:
        """Whether it restores exactly."""
        return self.report is not None and self.report.passed

    def to_json(self) -> dict[str, Any]:
        """As JSON; a refused architecture's figures are null."""
        mine = {"name": self.name, "caches": self.caches, "refused": self.refused}
        found = _NO_FIGURES if self.report is None else self.report.to_json()
        return mine | found | {"passed": self.passed}


def check_architecture(
    name: str, *, policies: Sequence[Policy] = tuple(Policy), steps: int = STEPS
) -> ArchitectureReport:
    """Build a tiny model of an architecture in a temporary directory, and check it."""
    caches = ARCHITECTURES[name].cache
    with tempfile.TemporaryDirectory(prefix="kvport-selfcheck-") as temporary:
        work = Path(temporary)
        try:
            build_model(name, work / "model")
            # Of the same vocabulary and of another mind: most guesses are rejected.
            build_model("llama", work / "draft", seed=1)
            report = selfcheck(
                name,
                work / "model",
                work=work,
                tokens=TOKENS,
                chunk=CHUNK,
                policies=policies,
                block=CHUNK,
                draft=DraftSource(work / "draft"),
                steps=steps,
            )
        except KvportError as error:
            return ArchitectureReport(name=name, caches=caches, refused=error.message)
    return ArchitectureReport(name=name, caches=caches, report=report)
