"""`docs/architectures.md`: every architecture's selfcheck, as a table.

Made by `python -m kvport.api.architectures_page`, which takes minutes.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from kvport.snapshot.engine.builder import KNOWN_ARCHITECTURES
from kvport.snapshot.engine.selfcheck import (
    CASE_NAMES,
    ArchitectureReport,
    CaseReport,
    check_architecture,
)

COLUMNS: Final = ("architecture", "caches", "requests", *CASE_NAMES, "cold")
"""Names of a row's cells."""

_HEAD: Final = """\
# Architectures

What `kvport selfcheck --all-architectures` finds for tiny models of every kind of cache
in mlx-lm that kvport knows. Requests store their state, everything is closed and opened
again, and the state is restored and continued for 32 greedy steps:

- `stride`: where a prompt parts from the stored one, at a stride point;
- `prompt`: one token before the prompt's end;
- `reply`: at the end of a reply, in the conversation's next turn;
- `batched`: the same after three replies that were decoded together, each of which
  joined while the others ran (one after the other, where requests run alone);
- `drafted`: the same after a reply whose tokens a draft model guessed, mostly wrongly,
  so that all layers were stepped back again and again.

Prompts have up to 172 tokens at chunk, stride and block 64, which is more than the tiny
models' windows; weights are random, float32, and the figures are the CPU's.

The figures are the largest absolute difference of log-probabilities, over the whole
vocabulary, to the origin's own continuation from its live caches, under the policies
`nearest` and `exact`; 0 is equal, bit for bit. In the column `cold` it is the
difference to an empty cache under `exact`, of all cases.

Requests are batched, or run alone where mlx-lm cannot batch the caches, or batches them
wrongly. A model whose state is of a kind that is not carried is refused, and served
without the cache.

This page is made by `python -m kvport.api.architectures_page`.

"""


def page(reports: Iterable[ArchitectureReport]) -> str:
    """The page, as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(row, reports)]
    return _HEAD + "".join(f"{markdown(line)}\n" for line in lines)


def markdown(cells: Sequence[str]) -> str:
    """A line of the page's table."""
    return f"| {' | '.join(cells)} |"


def row(report: ArchitectureReport) -> tuple[str, ...]:
    """One architecture's cells, in the order of `COLUMNS`."""
    found = report.report
    if found is None:
        empty = ("",) * (len(CASE_NAMES) + 1)
        return (report.name, report.caches, f"refused: {report.refused}", *empty)
    requests = "batched" if found.alone is None else f"alone: {found.alone}"
    cases = [
        _cell([case for case in found.cases if case.case == name])
        for name in CASE_NAMES
    ]
    cold = "" if found.max_diff_to_cold is None else figure(found.max_diff_to_cold)
    return (report.name, report.caches, requests, *cases, cold)


def figure(difference: float) -> str:
    """A difference, for people."""
    return "0" if difference == 0 else f"{difference:.1e}"


def _cell(cases: Sequence[CaseReport]) -> str:
    """The worst of a case under each policy."""
    for case in cases:
        if case.restored_tokens != case.expected_tokens:
            return f"restored {case.restored_tokens}, not {case.expected_tokens}"
    return figure(max(case.max_diff_to_hot for case in cases))


if __name__ == "__main__":
    sys.stdout.write(page(map(check_architecture, KNOWN_ARCHITECTURES)))
