"""`kvport cache stats`: what the cache holds and has done, by model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import rich_click as click

from kvport.api.cli.output import (
    STATE_NAMES,
    json_option,
    print_facts,
    print_json,
    print_table,
)
from kvport.api.cli.reach import Place, place_options, reached
from kvport.snapshot.known_roots import KnownRoots
from kvport.snapshot.units import format_bytes

_BESIDE: Final[Mapping[str, str]] = {
    "index": "(index)",
    "overhead": "(overhead)",
    "staging": "(uploads)",
    "held": "(reserved)",
    "orphans": "(orphans)",
}
"""Rows of the table that are no namespace."""
_NONE: Final = "-"


@click.command()
@place_options
@json_option
def stats(*, place: Place, as_json: bool) -> None:
    """Sizes, hits and misses, and the cap.

    The rows of the first table sum to its total, which is what the directory takes on
    its volume when nothing is going on. docs/operations.md says what each number means.
    Without a server nothing was counted yet, and cap and free floor are those of the
    last one, `auto` as of now.
    """
    with reached(place, starting=True) as admin:
        found = admin.stats()
    if as_json:
        print_json(found)
        return
    if reason := found["volume"]["reason"]:
        state, since = found["volume"]["state"], found["volume"]["since"]
        where = f" at {root}" if (root := _root(place)) else ""
        state = state.replace("_", " ")
        click.echo(f"the cache{where} is {state} since {since}: {reason}")
    if found["cache"] is not None:
        _print_cache(found)
    for name, counts in found["models"].items():
        click.echo(f"\nmodel {name}")
        print_facts(
            (f"  {what.replace('_', ' ')}", str(count))
            for what, count in counts.items()
        )


def _root(place: Place) -> Path | None:
    """Where the cache is, as far as this machine knows."""
    if place.cache_dir is not None or place.server.url is not None:
        return place.cache_dir
    return KnownRoots(place.server.home).served


def _print_cache(found: Mapping[str, Any]) -> None:
    cache = found["cache"]
    print_table(
        ("model", "namespace", "scope", ">segments", ">tokens",
         *(f">{name}" for name in STATE_NAMES.values()), ">all"),
        _held(found),
    )  # fmt: skip
    used, cap = format_bytes(found["total_bytes"]), found["effective_cap_bytes"]
    share = f"{used} of {format_bytes(cap)} ({found['used_percent']:.1f} %)"
    click.echo(f"\n{share if cap else f'{used}, and no room for more'}")
    if cap < found["cap_bytes"]:
        account = cache["account"]
        click.echo(
            f"the cap is {format_bytes(found['cap_bytes'])}, but the free floor leaves"
            f" less: {format_bytes(account['floor'])} of the volume are to stay free"
            f" (--free-floor), {format_bytes(account['free'])} are"
        )
    click.echo(f"\nsince {found['since']}\n")
    print_table(
        ("model", "namespace", ">hits", ">misses", ">restored", ">captured",
         ">written", ">per restored", ">per captured", "last use"),
        _counted(cache),
    )  # fmt: skip
    if events := list(_events(cache)):
        click.echo()
        print_table(("model", "namespace", "what", ">count", "why"), events)
    click.echo()
    print_facts(_others(cache))


def _held(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """What the total is made of."""
    cache = found["cache"]
    namespaces = cache["namespaces"]
    for one in namespaces:
        sizes = {kind: held["bytes"] for kind, held in one["kinds"].items()}
        yield (
            *_name(one), one["scope"], str(one["segments"]), str(one["tokens"]),
            *_sizes(sizes), format_bytes(one["bytes"]),
        )  # fmt: skip
    for kind, size in cache["beside"].items():
        if size or kind in {"index", "overhead"}:
            yield (_BESIDE.get(kind, kind), *[""] * 7, format_bytes(size))
    sums = {
        kind: sum(one["kinds"].get(kind, {"bytes": 0})["bytes"] for one in namespaces)
        for kind in STATE_NAMES
    }
    segments, tokens = (
        str(sum(one[name] for one in namespaces)) for name in ("segments", "tokens")
    )
    total = format_bytes(found["total_bytes"])
    yield ("total", "", "", segments, tokens, *_sizes(sums), total)


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    for kind in STATE_NAMES:
        yield format_bytes(sizes[kind]) if sizes.get(kind) else _NONE


def _counted(cache: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for name, one in _rows(cache):
        yield (
            *name, str(one["hits"]), str(one["misses"]),
            str(one["restored_tokens"]), str(one["captured_tokens"]),
            format_bytes(one["written_bytes"]),
            _rate(one["written_per_restored_token"]),
            _rate(one["written_per_captured_token"]), one["last_use"] or _NONE,
        )  # fmt: skip


def _rate(nbytes: float | None) -> str:
    return _NONE if nbytes is None else format_bytes(round(nbytes))


def _events(cache: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """What is worth a line if it happened."""
    for name, one in _rows(cache):
        if one is cache["total"]:
            continue
        for reason, count in one["removed"].items():
            yield (*name, "segments removed", str(count), reason)
        for reason, count in one["skipped"].items():
            yield (*name, "segments not stored", str(count), reason)
        for kind, pruned in one["pruned"].items():
            size = format_bytes(pruned["bytes"])
            what = f"{STATE_NAMES[kind]} blobs pruned"
            yield (*name, what, str(pruned["blobs"]), f"superseded, {size}")
        for kind, cleared in one["cleared"].items():
            size = format_bytes(cleared["bytes"])
            what = f"{STATE_NAMES[kind]} blobs removed"
            yield (*name, what, str(cleared["blobs"]), f"cleared, {size}")
        if one["failed_prunings"]:
            yield (*name, "paths not pruned", str(one["failed_prunings"]), "storage")
        if one["damaged"]:
            yield (*name, "blobs lost", str(one["damaged"]), "damaged or missing")


def _rows(cache: Mapping[str, Any]) -> Iterator[tuple[Sequence[str], Any]]:
    """Namespaces, those that are there no more if they count anything, all."""
    for one in cache["namespaces"]:
        yield _name(one), one
    gone = cache["gone"]
    if any(gone.values()):
        yield ("(gone)", ""), gone
    yield ("total", ""), cache["total"]


def _name(one: Mapping[str, Any]) -> Sequence[str]:
    return one["model"] or "(unknown)", one["id"][:8]


def _others(cache: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "leases", str(cache["leases"])
    if resets := cache["index_resets"]:
        yield "index lost", f"{resets} times"
