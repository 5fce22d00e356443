"""Selfcheck: does this machine restore this model's state exactly?

Through the real scheduler and a real cache on disk: requests are computed and captured,
everything is closed and opened again, and what they stored is restored and continued at
every kind of restore point. Compared are the full vocabulary's log-probabilities over
the prompt's last token and the greedy steps after it, against two references:

* *hot*: the origin's own continuation from the same position, taken straight from its
  live caches in canonical form. No blob, file or lookup is involved.
* *cold*: the same request on an empty cache; equal bit for bit under `exact` only.
"""

from kvport.snapshot.engine.selfcheck.architectures import (
    CHUNK,
    ArchitectureReport,
    check_architecture,
)
from kvport.snapshot.engine.selfcheck.cases import CASE_NAMES
from kvport.snapshot.engine.selfcheck.report import CaseReport, Report
from kvport.snapshot.engine.selfcheck.run import selfcheck

__all__ = [
    "CASE_NAMES",
    "CHUNK",
    "ArchitectureReport",
    "CaseReport",
    "Report",
    "check_architecture",
    "selfcheck",
]
