"""`kvport cache plan`, `gc` and `clear`: what would go, and what does."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import rich_click as click

from kvport.api.admin_bodies import ClearBody, PlanBody
from kvport.api.cli.options import AUTO, AUTO_FLOOR, CAP, DURATION, FLOOR, SIZE
from kvport.api.cli.output import STATE_NAMES, json_option, print_json, print_table
from kvport.api.cli.reach import Place, place_options, reached
from kvport.manifest.layout import BlobClass
from kvport.snapshot.units import format_bytes

_NONE: Final = "none"
_KEPT: Final = {"shared": "later state goes on from them, such as a reply"}
"""Reasons why segments stay, in more than their own word."""
_KINDS: Final = {name: BlobClass(value) for value, name in STATE_NAMES.items()}


@click.command()
@click.option(
    "--cap",
    type=CAP,
    metavar="SIZE|auto",
    help="With this cap; with the one there is unless given.",
)
@click.option(
    "--free-floor",
    type=FLOOR,
    metavar="SIZE|auto",
    help="With this free space on the volume; as it is unless given.",
)
@click.option(
    "--quota",
    "quotas",
    metavar="WHICH=SIZE|none",
    multiple=True,
    help="With this quota of a namespace (repeatable).",
)
@click.option("--gc", "with_gc", is_flag=True, help="What `gc` would remove as well.")
@place_options
@json_option
def plan(
    *,
    cap: int | None,
    free_floor: int | None,
    quotas: Sequence[str],
    with_gc: bool,
    place: Place,
    as_json: bool,
) -> None:
    """What a cap, a floor, quotas, a start or `gc` would remove, and why.

    Nothing is removed. Without a server it is what `kvport serve` would remove at its
    start, with the cap and the free floor of the last one for what is not given.
    """
    body = PlanBody(
        cap_bytes=AUTO if cap == 0 else cap,
        free_floor_bytes=AUTO if free_floor == AUTO_FLOOR else free_floor,
        quotas=dict(map(_quota, quotas)),
        gc=with_gc,
    )
    with reached(place, starting=True) as admin:
        found = admin.plan(body)
    if as_json:
        print_json(found)
        return
    _print_plan(found)


def _print_plan(found: Mapping[str, Any]) -> None:
    if found["rows"]:
        print_table(
            ("model", "namespace", "why", ">segments", ">size", "oldest", "newest"),
            (
                (
                    row["model"] or "(unknown)", row["namespace"][:8], row["reason"],
                    str(row["segments"]), format_bytes(row["bytes"]), row["oldest"],
                    row["newest"],
                )
                for row in found["rows"]
            ),
        )  # fmt: skip
        click.echo()
    for row in found["rows"]:
        if row["detail"]:
            name = row["model"] or row["namespace"][:8]
            click.echo(
                f"{name} ({row['namespace'][:8]}) is incompatible: {row['detail']}"
            )
    click.echo(
        f"{format_bytes(found['bytes'])} in {found['segments']} segments"
        " would be removed"
    )
    if ended := found["ended_pins"]:
        pins = "1 pin" if ended == 1 else f"{ended} pins"
        click.echo(f"{pins} would end: together they cover more than half of the cap")
    for namespace, nbytes in found["over_quota_bytes"].items():
        click.echo(
            f"{format_bytes(nbytes)} above the quota of {namespace[:8]} would stay,"
            " in use or pinned"
        )
    if missing := found["missing_bytes"]:
        held = found["in_use_bytes"]
        parts = []
        if held:
            parts.append(f"{format_bytes(held)} is state in use or pinned")
        if beside := missing - held:
            parts.append(
                f"{format_bytes(beside)} is for the index and what else the cache needs"
            )
        size = format_bytes(missing)
        click.echo(f"{size} more would have to go: {', '.join(parts)}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@place_options
@json_option
def gc(*, yes: bool, place: Place, as_json: bool) -> None:
    """Remove what is of no use, after showing it.

    That is what has expired, what the installed engine cannot use or whose model's
    directory is not there, segments that lead to no restore point, what is beyond a
    quota, and files that nothing refers to. `kvport cache plan --gc` shows it as well.
    It asks, unless there is no state to remove.
    """
    if not yes:
        _need_terminal()
    with reached(place) as admin:
        if not yes:
            found = admin.plan(PlanBody(gc=True))
            if not as_json:
                _print_plan(found)
            # Files that nothing refers to are no loss to anyone.
            if found["segments"]:
                _confirm(
                    f"{format_bytes(found['bytes'])} of state, and files that nothing"
                    " refers to"
                )
        found = admin.gc()
    if as_json:
        print_json(found)
        return
    print_freed(found)


def print_freed(found: Mapping[str, Any]) -> None:
    """What a removal did."""
    for reason, count in found["removed"].items():
        click.echo(f"{count} segments removed: {reason}")
    click.echo(f"{format_bytes(found['freed_bytes'])} freed")


@click.command()
@click.option("--namespace", metavar="WHICH", help="Only there; an id or a model.")
@click.option(
    "--kind", type=click.Choice(list(_KINDS)), help="Only state of this kind."
)
@click.option("--older-than", type=DURATION, help="Only what was not used for so long.")
@click.option(
    "--artifact",
    metavar="ID",
    help="Only what an artifact brought; its whole id, as in `artifacts --json`.",
)
@click.option(
    "--force", is_flag=True, help="Also what is pinned, or in use by requests."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@place_options
@json_option
def clear(
    *,
    namespace: str | None,
    kind: str | None,
    older_than: int | None,
    artifact: str | None,
    force: bool,
    yes: bool,
    place: Place,
    as_json: bool,
) -> None:
    """Remove stored state: all of it, or what meets all options.

    What is pinned or in use stays, unless --force is given. Models need not be loaded.
    """
    filters = (namespace, kind, older_than, artifact)
    body = ClearBody(
        namespace=namespace,
        kind=None if kind is None else _KINDS[kind],
        older_than=older_than,
        artifact=artifact,
        force=force,
        all=all(one is None for one in filters),
    )
    if not yes:
        _need_terminal()
    with reached(place) as admin:
        if not yes:
            _ask(body, admin.namespaces()["namespaces"])
        found = admin.clear(body)
    if as_json:
        print_json(found)
        return
    size = format_bytes(found["freed_bytes"])
    click.echo(f"{size} freed, {found['removed_segments']} segments removed")
    for reason, count in found["kept"].items():
        if count:
            click.echo(f"{count} segments kept: {_KEPT.get(reason, reason)}")


def _need_terminal() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("Without a terminal to ask on, --yes is needed.")


def _confirm(what: str) -> None:
    click.confirm(f"Remove {what}?", abort=True, err=True)


def _ask(body: ClearBody, namespaces: Sequence[Mapping[str, Any]]) -> None:
    """Ask, with the size of what may go: age and artifact make it less."""
    which = body.namespace
    nbytes = sum(
        held["bytes"]
        for one in namespaces
        if which is None
        or one["id"].startswith(which)
        or which in {one["model"], f"{one['model']}/{one['scope']}"}
        for kind, held in one["kinds"].items()
        if body.kind in {None, kind}
    )
    what = "all stored state" if body.all else "the state that meets this"
    size = f"{format_bytes(nbytes)} at most"
    _confirm(f"{what} ({size})")


def _quota(text: str) -> tuple[str, int | None]:
    which, equals, size = text.rpartition("=")
    if not equals or not which:
        raise click.BadParameter(f"{text!r} is not WHICH=SIZE", param_hint="--quota")
    return which, None if size == _NONE else SIZE.convert(size, None, None)
