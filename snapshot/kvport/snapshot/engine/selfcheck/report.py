"""What a selfcheck found."""

from collections.abc import Iterable
from typing import Any

import attrs

from kvport.snapshot.engine.requests import Policy


@attrs.frozen(kw_only=True)
class CaseReport:
    """One case under one policy.

    Attributes:
        case: its name.
        policy: the policy under which state was restored.
        restored_tokens: what was restored.
        expected_tokens: what the policy must give.
        max_diff_to_hot: largest absolute difference of log-probabilities to hot.
        max_diff_to_cold: the same to cold; None under `nearest`, which does not promise
            cold's bits.
    """

    case: str
    policy: Policy
    restored_tokens: int
    expected_tokens: int
    max_diff_to_hot: float
    max_diff_to_cold: float | None

    @property
    def passed(self) -> bool:
        """Whether the promises of design hold here."""
        restored = 0 < self.expected_tokens == self.restored_tokens
        return restored and self.max_diff_to_hot == 0 and not self.max_diff_to_cold

    @property
    def short(self) -> int:
        """Tokens that were expected and not restored."""
        return self.expected_tokens - self.restored_tokens

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return attrs.asdict(self) | {"passed": self.passed}


def worst(found: list[CaseReport]) -> CaseReport:
    """Several reports of one case under one policy as one: the worst of each figure."""
    least = max(found, key=lambda report: report.short)
    return attrs.evolve(
        least,
        max_diff_to_hot=max(report.max_diff_to_hot for report in found),
        max_diff_to_cold=_worst_cold(found),
    )


@attrs.frozen(kw_only=True)
class Report:
    """All cases of one model; the figures are the worst of any case.

    Attributes:
        model: its name.
        tokens: length of the longest stored prompt.
        alone: why its sequences run one at a time, or None.
        cases: what each case gave under each policy, one at least.
    """

    model: str
    tokens: int
    alone: str | None
    cases: tuple[CaseReport, ...]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(case.passed for case in self.cases)

    @property
    def restored_tokens(self) -> int:
        """Restored in the case that fell shortest; where none did, the least."""
        return self._least.restored_tokens

    @property
    def expected_tokens(self) -> int:
        """Expected in that case."""
        return self._least.expected_tokens

    @property
    def max_diff_to_hot(self) -> float:
        """Largest absolute difference of log-probabilities to hot."""
        return max(case.max_diff_to_hot for case in self.cases)

    @property
    def max_diff_to_cold(self) -> float | None:
        """The same to cold; None if nothing was restored under `exact`."""
        return _worst_cold(self.cases)

    @property
    def _least(self) -> CaseReport:
        return min(self.cases, key=lambda case: (-case.short, case.restored_tokens))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "restored_tokens": self.restored_tokens,
            "expected_tokens": self.expected_tokens,
            "max_diff_to_hot": self.max_diff_to_hot,
            "max_diff_to_cold": self.max_diff_to_cold,
            "alone": self.alone,
            "cases": [case.to_json() for case in self.cases],
            "passed": self.passed,
        }


def _worst_cold(found: Iterable[CaseReport]) -> float | None:
    cold = [r.max_diff_to_cold for r in found if r.max_diff_to_cold is not None]
    return max(cold, default=None)
