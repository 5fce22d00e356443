"""Drives the single-sequence lane, drafted and not, and takes its state at points."""

from functools import partial

import attrs
import mlx.core as mx
import numpy as np

from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.engine.steps import NewSequence
from kvport.snapshot.state.probe import make_caches
from kvport.snapshot.state.rows import take

BLOCK = 32
CHUNK = 64
MOTIF = np.random.default_rng(5).integers(1, 300, 13).tolist()
PROMPT = (MOTIF * 6)[:70]


@attrs.frozen(eq=False)
class Case:
    """A model, its layout, and how its keys and values are quantised."""

    module: object
    layout: object
    quantisation: object = None

    def lane(self, drafter=None, **options) -> Solo:
        make = partial(make_caches, self.module, self.quantisation)
        drafting = None
        if drafter is not None:
            drafting = Drafting(drafter, block_size=BLOCK, **options)
        return Solo(self.module, CHUNK, make, drafting)

    def canonical(self, live) -> dict:
        segments, whole = take(
            self.layout,
            live.caches,
            row=live.row,
            held=live.held,
            cuts=[(0, live.held)],
            state=True,
        )
        groups = [*segments[0].values(), *([whole] if whole else [])]
        return {
            (g, *key): a for g, group in enumerate(groups) for key, a in group.items()
        }


@attrs.define
class Reply:
    """What a sequence said, from what, and its state at block ends and at its end."""

    prompt: list[int]
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[mx.array] = attrs.Factory(list)
    states: dict[int, dict] = attrs.Factory(dict)
    finish: str | None = None
    ends: list[int] = attrs.Factory(list)
    """How long the text was after each step."""
    drafted: int = 0
    accepted: int = 0

    @property
    def verifies(self) -> int:
        return len(self.ends)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


def insert(lane, *, count=200, sampler=None, stops=()):
    return lane.insert(
        NewSequence(segments=[PROMPT], max_tokens=count, sampler=sampler, stops=stops)
    )


def reply(case, drafter=None, *, every=BLOCK, lane=None, **request):
    """Run a sequence to its end."""
    lane = lane or case.lane(drafter)
    uid, said = insert(lane, **request), Reply(PROMPT)
    while said.finish is None:
        step = lane.step()
        said.drafted += step.drafted
        said.accepted += step.accepted
        for place, token in enumerate(step.tokens, 1):
            assert token.uid == uid
            said.tokens.append(token.token)
            said.logprobs.append(token.logprobs)
            said.finish = token.finish
            held = len(said.text)
            if token.finish is not None or held % every == 0:
                # Nothing may have been handed out beyond a point.
                assert place == len(step.tokens)
                live = token.last or lane.live(uid)
                assert live.held == held
                said.states[held] = case.canonical(live)
        if step.tokens:
            said.ends.append(len(said.text))
    return said


class Oracle:
    """Knows what will be said, and lies where it is told to."""

    def __init__(self, text, right):
        self.text, self.right = text, right

    def __call__(self):
        return self

    def propose(self, tokens, count):
        begin = len(tokens)
        truth = self.text[begin : begin + count]
        return [
            token if self.right(position) else (token + 1) % 300
            for position, token in enumerate(truth, begin)
        ]


RIGHT = {
    "never": lambda _: False,
    "every second": lambda position: position % 2 == 0,
    "most": lambda position: position % 7 != 0,
    "always": lambda _: True,
}


def assert_close(ours, theirs):
    """Equal within float32 rounding; packed values within one step."""
    assert ours.states.keys() == theirs.states.keys()
    for held, state in ours.states.items():
        other = theirs.states[held]
        assert state.keys() == other.keys()
        for key, array in state.items():
            assert array.shape == other[key].shape
            if array.dtype == mx.uint32:
                a, b = (np.array(x).view(np.uint8) for x in (array, other[key]))
                assert np.mean(a != b) < 0.01
                continue
            allowed = 1e-4 * max(1.0, mx.abs(other[key]).max().item())
            assert mx.abs(array - other[key]).max().item() <= allowed
