"""One model's selfcheck: store, close, open again, restore, compare."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from kvport.manifest.keys import SigningKey
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.requests import Policy, Request
from kvport.snapshot.engine.selfcheck.cases import ORIGINS, Origin
from kvport.snapshot.engine.selfcheck.hot import Logprobs
from kvport.snapshot.engine.selfcheck.opened import Opened, Place
from kvport.snapshot.engine.selfcheck.report import CaseReport, Report, worst
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import EngineFailureError, SettingError
from kvport.snapshot.state.kv_form import KvForm

_LOOKUP: Final = DraftSource()
STEPS: Final = 32
"""Greedy steps after the prompt's last token."""
_APART: Final = float(np.finfo(np.float32).max)


@attrs.frozen(kw_only=True, eq=False)
class _Task:
    """A prompt to restore, and what must come of it."""

    case: str
    policy: Policy
    prompt: Sequence[int]
    at: int
    hot: Logprobs


def selfcheck(
    name: str,
    directory: Path,
    *,
    work: Path,
    tokens: int,
    chunk: int,
    policies: Sequence[Policy] = tuple(Policy),
    block: int = BLOCK_SIZE,
    kv_form: KvForm | None = None,
    draft: DraftSource = _LOOKUP,
    steps: int = STEPS,
    seed: int = 0,
) -> Report:
    """Check one model.

    Args:
        name: for the report.
        directory: the model's files.
        work: an empty directory for the cache; it is the caller's to remove.
        tokens: length of the longest random prompt, above `chunk` + 3.
        chunk: tokens evaluated at once, a multiple of `block`; the stride is the same.
        policies: the policies to restore under.
        block: tokens in a block.
        kv_form: of keys and values, if it is not the model's own.
        draft: where guesses come from in the case `drafted`.
        steps: greedy steps after each prompt's last token.
        seed: of the prompts.

    Raises:
        SettingError: the prompt is too short to have all points.
        UnsupportedModelError: the model runs without the cache, and why.
    """
    if tokens <= chunk + 3:
        raise SettingError(f"a prompt must be longer than {chunk + 3} tokens")
    place = Place(
        name=name,
        directory=directory,
        work=work,
        tuning=Tuning(chunk=chunk, stride=chunk, live_bytes=1 << 40, kv_form=kv_form),
        block=block,
        local=SigningKey.generate().public.key_id,
        steps=steps,
    )
    generator = np.random.default_rng(seed)
    tasks = list[_Task]()
    for drafted, origins in itertools.groupby(ORIGINS, lambda origin: origin.drafted):
        tuning = attrs.evolve(place.tuning, draft=draft if drafted else None)
        with Opened(place, tuning) as opened:
            for origin in origins:
                tasks += _store(opened, origin, tokens, policies, generator)
    found: dict[tuple[str, Policy], list[CaseReport]] = {}
    with Opened(place, place.tuning) as opened:
        alone = opened.model.alone
        for task in tasks:
            reports = found.setdefault((task.case, task.policy), [])
            reports.append(_restore(opened, task))
    cases = tuple(worst(reports) for reports in found.values())
    return Report(model=name, tokens=tokens, alone=alone, cases=cases)


def _store(
    opened: Opened,
    origin: Origin,
    tokens: int,
    policies: Sequence[Policy],
    generator: np.random.Generator,
) -> Iterator[_Task]:
    """Let an origin store its state; what its cases must restore of it."""
    vocabulary, chunk = opened.model.vocabulary, opened.place.tuning.chunk
    requests, wanted = [], []
    for length, reply in origin.lengths(tokens, chunk):
        requests.append(
            Request(
                tokens=origin.prompt(length, vocabulary, generator),
                max_tokens=reply,
                ignore_eos=True,
                read=False,
            )
        )
        wanted.append(
            frozenset(
                case.position(length, reply, chunk=chunk, policy=policy)
                for case in origin.cases
                for policy in policies
            )
        )
    for stored in opened.store(requests, wanted):
        for case, policy in itertools.product(origin.cases, policies):
            at = case.position(
                len(stored.prompt), len(stored.reply), chunk=chunk, policy=policy
            )
            prompt = case.follow(
                stored.prompt, stored.reply, chunk=chunk, vocabulary=vocabulary
            )
            state = stored.seen.get(at)
            if state is None:
                raise EngineFailureError(f"the caches were not seen at {at} tokens")
            yield _Task(
                case=case.name,
                policy=policy,
                prompt=prompt,
                at=at,
                hot=opened.hot(prompt, at, state),
            )


def _restore(opened: Opened, task: _Task) -> CaseReport:
    restored, warm = opened.restore(task.prompt, task.policy)
    cold = None
    if task.policy is Policy.EXACT:
        cold = _difference(warm, opened.cold(task.prompt, task.policy))
    return CaseReport(
        case=task.case,
        policy=task.policy,
        restored_tokens=restored,
        expected_tokens=task.at,
        max_diff_to_hot=_difference(warm, task.hot),
        max_diff_to_cold=cold,
    )


def _difference(left: Logprobs, right: Logprobs) -> float:
    """Largest absolute difference, finite; what is equal does not differ."""
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):  # equal infinities
        found = np.where(same, 0, np.abs(left - right))
    # Not a number on one side only: as far apart as can be, and still JSON.
    return float(np.nan_to_num(found, nan=_APART).max())
