"""`--points` and `--draft`: for all models, or for one by its name."""

import pytest
import rich_click as click

from kvport.api.cli.per_model import PointSettings, drafts, points
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.drafting.drafter import DraftSource

NAMES = ["big", "small"]


def parsed(*values, stride=4096, chunk=512):
    return points(values, NAMES, stride=stride, chunk=chunk)


def test_without_a_value_all_models_have_the_defaults():
    default = PointSettings(stride=4096, retention=Retention())
    assert parsed() == {"big": default, "small": default}


def test_a_value_with_a_name_goes_before_one_without():
    found = parsed("small:prompts=3,stride=512", "forks=5,prompts=2", "small:every=512")
    assert found == {
        "big": PointSettings(stride=4096, retention=Retention(forks=5, prompts=2)),
        "small": PointSettings(
            stride=512, retention=Retention(forks=5, prompts=3, every=512)
        ),
    }


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("other:prompts=2", "no model is called 'other'"),
        ("points=2", "not one of stride, newest, every, forks, prompts, replies"),
        ("prompts=two", "with a number"),
        ("prompts=", "with a number"),
        ("prompts=-1", "below 1"),
        ("prompts=0", "below 1"),
        ("stride=" + "9" * 5000, "with a number"),
        ("stride=100", "not a multiple of the chunk, 512"),
        ("", "not one of"),
    ],
)
def test_points_of_another_form_are_refused(value, reason):
    with pytest.raises(click.BadParameter, match=reason):
        parsed(value)


def test_drafts_by_model(tmp_path):
    found = drafts(["lookup", f"big:{tmp_path}"], NAMES, 5)
    assert found == {"big": DraftSource(tmp_path, 5), "small": DraftSource(tokens=5)}
    assert drafts(["lookup", "big:off"], NAMES, 8)["big"] is None
    assert drafts([], NAMES, 8) == {"big": None, "small": None}


@pytest.mark.parametrize(
    "value", ["nowhere", "big:nowhere", "big:", "x:lookup", "~nobody-here/x"]
)
def test_a_draft_that_is_no_directory_is_refused(value):
    with pytest.raises(click.BadParameter):
        drafts([value], NAMES, 8)
