"""Settings that may differ from model to model: `[MODEL:]...`, without mlx.

In: the values of `--points`, `--draft` and `--keep-alive`, and the names of the models.
Out: for each model what holds for it. A value with a model's name goes before one
without; those without hold for models that are loaded later, too: `ANY`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import rich_click as click

from kvport.api.cli.options import KEEP_ALIVE
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.source import directory_at

ANY: Final = ""
"""In place of a model's name: of models that are not known yet."""
LOOKUP: Final = "lookup"
OFF: Final = "off"
_INTEGER: Final = re.compile(r"-?[0-9]{1,12}", re.ASCII)
_NUMBERS: Final = ("stride", *(field.name for field in attrs.fields(Retention)))


@attrs.frozen(kw_only=True)
class PointSettings:
    """Which points a model's prompts get, and how many of them stay.

    Attributes:
        stride: tokens between `stride` points.
        retention: what is kept of a conversation.
    """

    stride: int
    retention: Retention


def points(
    values: Sequence[str], names: Iterable[str], *, stride: int, chunk: int
) -> dict[str, PointSettings]:
    """For each model its points.

    Args:
        values: of `--points`.
        names: of the models.
        stride: where no value says otherwise.
        chunk: which every stride is a multiple of.

    Raises:
        BadParameter: a value of another form, or a number out of range.
    """
    chosen = _chosen(values, names, "--points")
    return {name: _points(texts, stride, chunk) for name, texts in chosen.items()}


def drafts(
    values: Sequence[str], names: Iterable[str], tokens: int
) -> dict[str, DraftSource | None]:
    """For each model where its drafts come from, None for no drafting.

    Raises:
        BadParameter: two values for one model, or no such directory.
    """
    chosen = _chosen(values, names, "--draft")
    return {name: _draft(texts, tokens) for name, texts in chosen.items()}


def keep_alives(values: Sequence[str], names: Iterable[str]) -> dict[str, float]:
    """For each model, seconds without a request after which it goes, or infinity.

    Raises:
        BadParameter: a value of another form.
    """
    chosen = _chosen(values, names, "--keep-alive")
    try:
        return {
            name: KEEP_ALIVE.convert(texts[-1], None, None) if texts else math.inf
            for name, texts in chosen.items()
        }
    except click.BadParameter as error:
        error.param_hint = "--keep-alive"
        raise


def _chosen(
    values: Sequence[str], names: Iterable[str], option: str
) -> dict[str, list[str]]:
    """The values that hold for each model and for `ANY`, general ones first."""
    found: dict[str, list[str]] = {name: [] for name in (*names, ANY)}
    general: list[str] = []
    for value in values:
        name, colon, rest = value.partition(":")
        if not colon:
            general.append(value)
        elif name in found and name != ANY:
            found[name].append(rest)
        else:
            raise click.BadParameter(f"no model is called {name!r}", param_hint=option)
    return {name: [*general, *own] for name, own in found.items()}


def _points(texts: Sequence[str], stride: int, chunk: int) -> PointSettings:
    numbers: dict[str, int] = {"stride": stride}
    for part in ",".join(texts).split(",") if texts else ():
        key, _, value = part.partition("=")
        if key not in _NUMBERS or not _INTEGER.fullmatch(value):
            known = ", ".join(_NUMBERS)
            raise click.BadParameter(
                f"{part!r} is not one of {known}, with a number: stride=8192",
                param_hint="--points",
            )
        if (number := int(value)) < 1:
            raise click.BadParameter(f"{part!r} is below 1", param_hint="--points")
        numbers[key] = number
    if numbers["stride"] % chunk:
        raise click.BadParameter(
            f"stride={numbers['stride']} is not a multiple of the chunk, {chunk}",
            param_hint="--points",
        )
    return PointSettings(stride=numbers.pop("stride"), retention=Retention(**numbers))


def _draft(texts: Sequence[str], tokens: int) -> DraftSource | None:
    if not texts or texts[-1] == OFF:
        return None
    if (source := texts[-1]) == LOOKUP:
        return DraftSource(tokens=tokens)
    if (directory := directory_at(source)) is None:
        raise click.BadParameter(
            f"{source!r} is neither {LOOKUP}, {OFF}, nor a model's directory",
            param_hint="--draft",
        )
    return DraftSource(directory, tokens)
