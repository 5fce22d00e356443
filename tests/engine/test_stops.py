"""The plan of a prompt: stops, points, cuts."""

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import CacheKind, CacheLayout, LeafSpec, StateLayout
from kvport.snapshot.engine.stops import cuts, plan

KV = CacheLayout("0", CacheKind.KV, None, (LeafSpec("k", "F32", (1, 1, -1, 2)),))
STATE = CacheLayout("1", CacheKind.ARRAYS, None, (LeafSpec("s0", "F32", (1, 2)),))
FULL, HYBRID = StateLayout((KV,)), StateLayout((KV, STATE))


def test_worked_example_of_a_hybrid_turn():
    way = plan(600, layout=HYBRID, chunk=512, stride=4096, fork=590)
    assert way.stops == (512, 590, 599)
    assert way.points == {590: {PointKind.FORK}, 599: {PointKind.PROMPT}}
    assert cuts(0, 512, 256, way.points) == [(0, 256), (256, 512)]
    assert cuts(512, 590, 256, way.points) == [(512, 590)]
    assert cuts(599, 700, 256, {700: ()}) == [(599, 700)]
    assert cuts(590, 999, 256, {}) == [(590, 768), (768, 999)]


def test_full_layers_cut_but_do_not_stop_at_a_fork():
    way = plan(600, layout=FULL, chunk=512, stride=4096, fork=590)
    assert way.stops == (512, 599)
    assert cuts(512, 599, 256, way.points) == [(512, 590), (590, 599)]


def test_stops_do_not_depend_on_what_was_restored():
    way = plan(2000, layout=HYBRID, chunk=512, stride=1024, fork=700)
    prompt = list(range(2000))
    rest = way.segments(prompt, 700)
    assert way.segments(prompt, 512)[1:] == rest
    assert way.segments(prompt, 1999) == [[1999]]
    assert [len(s) for s in rest] == [1024 - 700, 512, 1999 - 1536, 1]
    assert way.points[1024] == {PointKind.STRIDE}


def test_one_token_has_no_stop():
    way = plan(1, layout=HYBRID, chunk=512, stride=4096, fork=None)
    assert way.stops == ()
    assert way.segments([7], 0) == [[7]]
    assert not way.points


def test_a_position_may_have_several_kinds():
    way = plan(513, layout=HYBRID, chunk=512, stride=512, fork=512)
    assert way.stops == (512,)
    assert way.points == {512: {PointKind.STRIDE, PointKind.FORK, PointKind.PROMPT}}
