"""SIGKILL before every step, and in the middle of every write."""

import pytest

from tests.crash.driver import spread
from tests.crash.operations import OPERATIONS
from tests.crash.shim import linux_only

pytestmark = linux_only


def kills(recorded, steps, report) -> None:
    done = {(step, half): recorded.killed(step, half=half) for step, half in steps}
    killed = {point: bad for point, bad in done.items() if bad is not None}
    found = {point: bad for point, bad in killed.items() if bad}
    report("kill", recorded.name, len(killed), len(found))
    assert found == {}
    assert len(killed) > len(steps) // 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_some_steps(recorded, name, report):
    one = recorded(name)
    steps = spread(16, one.steps)
    kills(one, [(s, bool(n % 2)) for n, s in enumerate(steps)], report)


@pytest.mark.soak
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_every_step(recorded, name, half, report):
    one = recorded(name)
    kills(one, [(s, half) for s in range(1, one.steps + 1)], report)
