"""A power cut after every operation, with what no flush has covered lost or torn."""

import pytest

from tests.crash.driver import spread
from tests.crash.operations import OPERATIONS
from tests.crash.replaying import Loss
from tests.crash.shim import linux_only

pytestmark = linux_only


def cuts(recorded, points, report, kind="power cut") -> dict:
    done = list(recorded.cut(points))
    found = {
        (cut.done, cut.loss.value, cut.seed): cut.violations
        for cut in done
        if cut.violations
    }
    report(kind, recorded.name, len(done), len(found))
    return found


def some(recorded, count):
    losses = list(Loss)
    steps = spread(count, len(recorded.log), first=0)
    return {step: [(losses[n % len(losses)], n)] for n, step in enumerate(steps)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_power_cut_at_some_operations(recorded, name, report):
    one = recorded(name)
    assert cuts(one, some(one, 13), report) == {}


@pytest.mark.soak
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("name", OPERATIONS)
def test_power_cut_at_every_operation(recorded, name, loss, report):
    one = recorded(name)
    points = {step: [(loss, step)] for step in range(len(one.log) + 1)}
    assert cuts(one, points, report) == {}


@pytest.mark.parametrize("swallow", ["all", "index", "blobs"])
def test_a_build_without_its_flushes_fails(recorded, swallow, report):
    """Of all files, of the index (`synchronous=OFF`), or of blobs and directories."""
    one = recorded("store", swallow)
    found = cuts(one, some(one, 12), report, f"power cut, no flushes of {swallow}")
    assert len(found) >= 4


@pytest.mark.soak
@pytest.mark.parametrize("swallow", ["all", "index", "blobs"])
@pytest.mark.parametrize("name", ["store", "evict", "import", "begin"])
def test_every_operation_without_its_flushes_fails(recorded, name, swallow, report):
    one = recorded(name, swallow)
    points = {step: [(loss, step) for loss in Loss] for step in range(len(one.log) + 1)}
    kind = f"power cut, no flushes of {swallow}"
    assert cuts(one, points, report, kind)
