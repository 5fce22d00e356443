"""`kvport cache namespace`: what each model's state takes, and what is set about it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import rich_click as click

from kvport.api.admin_bodies import NamespaceBody
from kvport.api.cli.options import DURATION, SIZE
from kvport.api.cli.output import (
    json_option,
    print_facts,
    print_json,
    print_table,
    say,
)
from kvport.api.cli.reach import Place, place_options, reached
from kvport.api.cli.removal import print_freed
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.orders import Named, meant
from kvport.snapshot.refusals import explain
from kvport.snapshot.units import format_bytes, format_seconds

_NONE: Final = "none"
_DASH: Final = "-"
_Given = int | str | None


class OrNone(click.ParamType[int | str]):
    """What another type takes, or `none`."""

    def __init__(self, kind: click.ParamType[int]) -> None:
        """Of this type."""
        self.name = kind.name
        self._kind: Final = kind

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int | str:
        """A number, or `none`."""
        if value == _NONE:
            return _NONE
        return self._kind.convert(value, param, ctx)


@click.command("list")
@place_options
@json_option
def list_(*, place: Place, as_json: bool) -> None:
    """Namespaces: what each holds, and what is set about it.

    A namespace is the state of one model, in one version, for one scope. `share` is
    what no other model's state takes from it. `kvport cache namespace show` says where
    settings come from.
    """
    with reached(place) as admin:
        found = admin.namespaces()
    if as_json:
        print_json(found)
        return
    print_table(
        ("model", "namespace", "scope", ">size", ">share", ">quota", ">ttl", "tier",
         ">write/h", "also set", "last loaded"),
        map(_line, found["namespaces"]),
    )  # fmt: skip
    for one in found["namespaces"]:
        if one["incompatible"]:
            name = one["model"] or one["id"][:8]
            click.echo(
                f"\n{name} ({one['id'][:8]}) is incompatible: {one['incompatible']}"
            )


@click.command()
@click.argument("which")
@place_options
@json_option
def show(*, which: str, place: Place, as_json: bool) -> None:
    """One namespace: what is set about it, and where.

    WHICH is as of `namespace set`.
    """
    with reached(place) as admin:
        found = {one["id"]: one for one in admin.namespaces()["namespaces"]}
    named = [
        Named(
            id=one["id"],
            names=one["names"],
            scope=one["scope"],
            is_usable=one["incompatible"] is None,
        )
        for one in found.values()
    ]
    one = found[meant(which, named).id]
    if as_json:
        print_json(one)
        return
    print_facts(_facts(one))


@click.command("set")
@click.argument("which")
@click.option(
    "--quota",
    type=OrNone(SIZE),
    metavar="SIZE|none",
    help="What it may hold at most, and what no other model takes from it. What is"
    " above goes at once.",
)
@click.option(
    "--ttl",
    type=OrNone(DURATION),
    metavar="DURATION|none",
    help="Time after its last use until state expires, such as 12h or 30d. What has"
    " expired goes at once.",
)
@click.option(
    "--tier",
    type=click.Choice([*(tier.value for tier in Tier), _NONE]),
    help="`read-only`: what is stored is restored, nothing is added. `off`: neither.",
)
@click.option(
    "--reclaim/--no-reclaim",
    default=None,
    help="Whether its state goes when its model is unloaded.",
)
@click.option(
    "--write-per-hour",
    type=OrNone(SIZE),
    metavar="SIZE|none",
    help="What may be written to the disk for it within any hour.",
)
@click.option(
    "--retention",
    metavar="NAME=N,...|none",
    help="Points of a conversation that stay: newest, every (tokens), forks, prompts,"
    " replies (how many). What is not named stays as it was set.",
)
@place_options
@json_option
def set_(
    *,
    which: str,
    quota: _Given,
    ttl: _Given,
    tier: str | None,
    reclaim: bool | None,
    write_per_hour: _Given,
    retention: str | None,
    place: Place,
    as_json: bool,
) -> None:
    """Change settings of one namespace, at once and for later starts.

    A lower quota or a shorter ttl removes what is beyond it at once, with a server or
    without; look before with `kvport cache plan --quota WHICH=SIZE`.

    WHICH is its id, 8 digits or more of its beginning, a name of its model, or
    NAME/SCOPE. `none` takes back what was set here before; then config.toml in the home
    holds.
    """
    given = {
        "quota_bytes": quota,
        "ttl": ttl,
        "tier": tier,
        "reclaim_on_unload": reclaim,
        "write_bytes_per_hour": write_per_hour,
        "retention": _retention(retention),
    }
    fields = {
        name: None if value == _NONE else value
        for name, value in given.items()
        if value is not None
    }
    if not fields:
        raise click.UsageError("Name at least one setting.")
    body = _body({"namespace": which, **fields})
    with reached(place) as admin:
        one = admin.set_namespace(body)
    if as_json:
        print_json(one)
        return
    print_facts(_facts(one))
    click.echo()
    print_freed(one)
    for warning in one["warnings"]:
        say(f"warning: {warning}")


def _body(fields: Mapping[str, Any]) -> NamespaceBody:
    try:
        return msgspec.convert(fields, NamespaceBody)
    except msgspec.ValidationError as error:
        refused = explain(str(error), NamespaceBody)
        if refused.how:
            *_, name = refused.field.split(".")
            known = ", ".join(refused.known)
            text = f"There is no {name!r}; there are {known}."
            raise click.BadParameter(text, param_hint="--retention") from error
        raise click.UsageError(f"{refused.field}: {refused.what}.") from error


def _retention(text: str | None) -> Mapping[str, int] | str | None:
    if text is None or text == _NONE:
        return text
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not number.isascii() or not number.isdigit() or name in found:
            raise click.BadParameter(
                f"{part!r} is not NAME=N", param_hint="--retention"
            )
        found[name] = int(number)
    return found


def _line(one: Mapping[str, Any]) -> Sequence[str]:
    settings = one["settings"]
    return (
        one["model"] or "(unknown)", one["id"][:8], one["scope"],
        format_bytes(one["bytes"]), _size(one["share_bytes"]),
        _size(settings["quota_bytes"]), _seconds(settings["ttl"]), settings["tier"],
        _size(settings["write_bytes_per_hour"]), _others(settings),
        one["last_loaded"] or _DASH,
    )  # fmt: skip


def _others(settings: Mapping[str, Any]) -> str:
    """Names of what is set that takes no column."""
    names = {"reclaim": "reclaim_on_unload", "retention": "retention"}
    return ", ".join(name for name, key in names.items() if settings[key]) or _DASH


def _facts(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings, origins = one["settings"], one["origins"]
    yield "namespace", one["id"]
    yield "model", one["model"] or "(unknown)"
    yield "source", one["source"] or "(unknown)"
    yield "scope", one["scope"]
    yield "last loaded", one["last_loaded"] or _DASH
    if one["incompatible"]:
        yield "incompatible", one["incompatible"]
    yield "size", format_bytes(one["bytes"])
    yield "share", _size(one["share_bytes"])
    retention = settings["retention"] or {}
    shown = {
        "quota_bytes": ("quota", _size(settings["quota_bytes"])),
        "ttl": ("ttl", _seconds(settings["ttl"])),
        "tier": ("tier", settings["tier"]),
        "reclaim_on_unload": (
            "reclaim",
            "yes" if settings["reclaim_on_unload"] else "no",
        ),
        "write_bytes_per_hour": (
            "write per hour",
            _size(settings["write_bytes_per_hour"]),
        ),
        "retention": (
            "retention",
            ",".join(f"{name}={number}" for name, number in retention.items())
            or "as the model is served",
        ),
    }
    for field, (name, value) in shown.items():
        origin = origins.get(field)
        yield name, value if origin is None else f"{value}  (by {origin})"


def _size(size: int | None) -> str:
    return format_bytes(size) if size else _DASH


def _seconds(seconds: int | None) -> str:
    return _DASH if seconds is None else format_seconds(seconds)
