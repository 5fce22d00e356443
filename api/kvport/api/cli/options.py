"""Options that several commands share."""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import attrs
import platformdirs
import rich_click as click

from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import KvportError
from kvport.manifest.recipients import Recipient
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.state.kv_form import KEEP, KvForm, Limit, Quantisation
from kvport.snapshot.units import parse_seconds, parse_size

NEVER: Final = "never"
_TEN_YEARS: Final = 315_360_000
_Command = TypeVar("_Command", bound=Callable[..., Any])
_Number = TypeVar("_Number", bound=float)

FILE: Final = click.Path(readable=False, allow_dash=True, path_type=Path)
"""A file, or `-`; opening it tells whether it can be used, always in the same words."""

POLICY: Final = click.Choice([policy.value for policy in Policy])
"""A policy by its name."""


AUTO: Final = "auto"
AUTO_FLOOR: Final = -1


class Measure(click.ParamType[_Number]):
    """A number with a unit, or a word that stands for a number."""

    def __init__(
        self,
        name: str,
        parse: Callable[[str], _Number],
        words: Mapping[str, _Number] | None = None,
    ) -> None:
        self.name = name
        self._parse = parse
        self._words = words or {}

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> _Number:
        """The number, without its unit."""
        if not isinstance(value, str):
            return cast("_Number", value)
        try:
            return self._words[value] if value in self._words else self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_keep_alive(text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, nor {NEVER}") from error
    if seconds > _TEN_YEARS:
        raise ValueError(f"{text!r} is above ten years; say {NEVER}")
    return seconds


SIZE: Final = Measure("size", parse_size)
"""A number of bytes: `1500000`, `1.5GB`, `8GiB`, or `8G`, which is `8GiB`."""
CAP: Final = Measure("size", parse_size, {AUTO: 0})
"""A size, or `auto`, which is none: 0."""
FLOOR: Final = Measure("size", parse_size, {AUTO: AUTO_FLOOR, "0": 0})
"""A size, 0, or `auto`."""
DURATION: Final = Measure("duration", parse_seconds)
"""A number of seconds: `90`, `90s`, `15m`, `12h`, `30d`, `2w`."""
KEEP_ALIVE: Final = Measure("duration", _parse_keep_alive, {NEVER: math.inf})
"""A duration of up to ten years, or `never`, after which a model is unloaded."""


def _address(_: click.Context, __: click.Parameter, url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        fits = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise click.BadParameter("not an address such as http://127.0.0.1:8470")
    return url


def home_option(command: _Command) -> _Command:
    """Add `--home`, as the parameter `home`."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="KVPORT_HOME",
        show_envvar=True,
        default=lambda: platformdirs.user_data_path("kvport", appauthor=False),
        show_default="kvport in your data directory",
        help="Directory of keys, trust list and records.",
    )(command)


class _RecipientKey(click.ParamType[Recipient]):
    """The public key of whom a file is sealed for."""

    name = "key"

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Recipient:
        """See `click.ParamType`."""
        if isinstance(value, Recipient):
            return value
        try:
            return Recipient(parse_hex32(str(value).strip().lower()))
        except KvportError:
            self.fail(
                "not a recipient's key: give the 64 hex digits that"
                " `kvport keys recipient` prints on the other machine",
                param,
                ctx,
            )


RECIPIENT: Final = _RecipientKey()


@attrs.frozen
class Server:
    """The server that a command talks to.

    Attributes:
        home: of the server, unless it is elsewhere.
        url: its address, if it is not the one running on the home.
        key_file: a file with its API key, if that is not in the home.
    """

    home: Path
    url: str | None
    key_file: Path | None


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--home`, `--url` and `--api-key-file`, as one parameter `server`."""

    @functools.wraps(command)
    def with_server(
        *, home: Path, url: str | None, api_key_file: Path | None, **rest: object
    ) -> None:
        if api_key_file is not None and url is None:
            raise click.UsageError("--api-key-file goes with --url.")
        command(server=Server(home, url, api_key_file), **rest)

    url_option = click.option(
        "--url",
        metavar="URL",
        callback=_address,
        help="Address of the server, if it is not the one running on the home. Its key"
        " is in KVPORT_API_KEY or --api-key-file, else it must be the home's server.",
    )
    key_option = click.option(
        "--api-key-file",
        type=FILE,
        help="A file with the API key of the server at --url.",
    )
    return url_option(key_option(home_option(with_server)))


def model_option(command: _Command) -> _Command:
    """Add `--model`, as the parameter `model`."""
    return click.option(
        "--model",
        metavar="NAME",
        help="The model's name on the server; not needed if it has exactly one.",
    )(command)


def kv_form_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the forms that keys and values may have, as one parameter `kv_form`."""

    @functools.wraps(command)
    def with_form(
        *,
        kv_bits: str | None,
        kv_group_size: str,
        max_kv_size: int | None,
        **rest: object,
    ) -> None:
        form: KvForm | None = None
        if kv_bits is not None:
            form = Quantisation(int(kv_bits), int(kv_group_size))
        if max_kv_size is not None:
            if form is not None:
                raise click.UsageError("--max-kv-size and --kv-bits exclude each other")
            form = Limit(max_kv_size)
        command(kv_form=form, **rest)

    bits = click.option(
        "--kv-bits",
        type=click.Choice(["4", "8"]),
        help="Quantise keys and values from the first token on; requests then run one"
        " at a time. By default they are kept in the model's own precision.",
    )
    group_size = click.option(
        "--kv-group-size",
        type=click.Choice(["32", "64", "128"]),
        default="64",
        show_default=True,
        help="Values that share a scale, with --kv-bits.",
    )
    limit = click.option(
        "--max-kv-size",
        type=click.IntRange(min=KEEP + 1),
        metavar="ROWS",
        help=f"Forget tokens: keep the first {KEEP} and the last ones, ROWS in all, as"
        " mlx-lm's option does; requests then run one at a time.",
    )
    return bits(group_size(limit(with_form)))
