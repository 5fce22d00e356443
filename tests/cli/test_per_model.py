"""`--points`, `--draft` and `--keep-alive`: for all models, or for one by its name."""

import math

import pytest
import rich_click as click

from kvport.api.cli.per_model import ANY, PointSettings, drafts, keep_alives, points
from kvport.api.cli.starting import named
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.models import locate
from kvport.snapshot.errors import ModelLoadError

NAMES = ["big", "small"]


def parsed(*values, stride=4096, chunk=512):
    return points(values, NAMES, stride=stride, chunk=chunk)


def test_without_a_value_all_models_have_the_defaults():
    default = PointSettings(stride=4096, retention=Retention())
    assert parsed() == {"big": default, "small": default, ANY: default}


def test_a_value_with_a_name_goes_before_one_without():
    found = parsed("small:prompts=3,stride=512", "forks=5,prompts=2", "small:every=512")
    assert found == {
        "big": PointSettings(stride=4096, retention=Retention(forks=5, prompts=2)),
        ANY: PointSettings(stride=4096, retention=Retention(forks=5, prompts=2)),
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
        (":forks=2", "no model is called ''"),
    ],
)
def test_points_of_another_form_are_refused(value, reason):
    with pytest.raises(click.BadParameter, match=reason):
        parsed(value)


def test_drafts_by_model(tmp_path):
    found = drafts(["lookup", f"big:{tmp_path}"], NAMES, 5)
    lookup = DraftSource(tokens=5)
    assert found == {"big": DraftSource(tmp_path, 5), "small": lookup, ANY: lookup}
    assert drafts(["lookup", "big:off"], NAMES, 8)["big"] is None
    assert drafts([], NAMES, 8) == {"big": None, "small": None, ANY: None}


@pytest.mark.parametrize(
    "value", ["nowhere", "big:nowhere", "big:", "x:lookup", "~nobody-here/x"]
)
def test_a_draft_that_is_no_directory_is_refused(value):
    with pytest.raises(click.BadParameter):
        drafts([value], NAMES, 8)


def test_how_long_models_are_kept():
    found = keep_alives(["30m", "big:never", "small:5"], NAMES)
    assert found == {"big": math.inf, "small": 5, ANY: 1800}
    assert set(keep_alives([], NAMES).values()) == {math.inf}


@pytest.mark.parametrize("value", ["0", "-1", "soon", "big:", "11y", "4000d", "x:5"])
def test_a_time_of_another_form_is_refused(value):
    with pytest.raises(click.BadParameter):
        keep_alives([value], NAMES)


@pytest.mark.parametrize("text", ["a" * 600, "a/" + "b" * 600, "a\0b"])
def test_text_that_can_be_no_path_is_no_directory(text):
    with pytest.raises(click.BadParameter):
        drafts([text], NAMES, tokens=4)
    with pytest.raises(ModelLoadError):
        locate(named(f"x={text}").source)
