"""A volume that refuses: once, or from some step on; and one that is slow."""

import errno
import itertools

import pytest

from tests.crash.driver import spread
from tests.crash.operations import OPERATIONS
from tests.crash.shim import linux_only

pytestmark = linux_only

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
CODES = {"storage", "disk_full", "capacity", "gone", "missing_root"}


def faults(recorded, points, report) -> None:
    found, codes = {}, set()
    for step, error, sticky, half in points:
        said, bad = recorded.failed(fail=step, errno=error, sticky=sticky, half=half)
        codes |= set(said)
        if bad:
            found[step, errno.errorcode[error], sticky, half] = bad
    report("fault", recorded.name, len(points), len(found))
    assert found == {}
    assert codes <= CODES


@pytest.mark.parametrize("name", OPERATIONS)
def test_refused_at_some_steps(recorded, name, report):
    one = recorded(name)
    kinds = itertools.cycle(itertools.product((0, 1), ERRORS, (0, 1)))
    steps = spread(13, one.steps)
    points = [(s, e, k, h) for s, (h, e, k) in zip(steps, kinds, strict=False)]
    faults(one, points, report)


@pytest.mark.soak
@pytest.mark.parametrize("sticky", [0, 1])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_refused_at_every_step(recorded, name, error, sticky, report):
    one = recorded(name)
    points = [(s, error, sticky, s % 2) for s in range(1, one.steps + 1)]
    faults(one, points, report)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_slow_disk_takes_time_only(recorded, name):
    assert recorded(name).failed(delay=1000) == ([], [])
