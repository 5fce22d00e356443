"""`kvport trust`: the allow-list of a home.

A server reads the list for every import, so a change counts from the next one on.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import rich_click as click

from kvport.api.cli.errors import NotListedError
from kvport.api.cli.options import home_option
from kvport.api.cli.output import (
    fingerprint,
    json_option,
    print_facts,
    print_json,
    print_table,
)
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError
from kvport.manifest.keys import PublicKey, parse_key_id
from kvport.manifest.timestamps import ALWAYS, format_time
from kvport.manifest.trust import ANY, TrustEntry
from kvport.snapshot.keyring import Keyring

_NAMES_HELP = " (repeatable; all unless given)"


@click.command("list")
@home_option
@json_option
def list_(home: Path, *, as_json: bool) -> None:
    """Keys that are trusted, and with what.

    A new home trusts its own key, "this node", and no other.
    """
    entries = Keyring(home).load_trust().entries
    if as_json:
        print_json({"trust": [entry.to_json() for entry in entries]})
        return
    print_table(
        ("name", "fingerprint", "scopes", "models", "until", "key id"),
        (
            (
                entry.name,
                fingerprint(entry.key_id),
                _names(entry.scopes),
                _names(entry.models),
                _until(entry.not_after),
                entry.key_id,
            )
            for entry in entries
        ),
    )


@click.command()
@click.argument("public_key")
@click.option("--name", required=True, help="Whose key it is, for people.")
@click.option(
    "--scope", "scopes", multiple=True, help=f"A scope it may sign for{_NAMES_HELP}."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help=f"A model, as served here, that it may bring state for{_NAMES_HELP}.",
)
@click.option(
    "--expires",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"]),
    help="UTC time from which it is trusted no longer.",
)
@home_option
@json_option
def add(
    public_key: str,
    *,
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    expires: datetime | None,
    home: Path,
    as_json: bool,
) -> None:
    """Trust the key of another machine.

    PUBLIC_KEY is what `kvport keys show` prints there. Files that it signs are
    imported from now on. What was said about the same key before is replaced.
    """
    until = expires.replace(tzinfo=UTC) if expires else ALWAYS[1]
    if until <= datetime.now(UTC):
        raise click.BadParameter("that time is over", param_hint="--expires")
    try:
        entry = TrustEntry(
            public_key=PublicKey(parse_hex32(public_key.lower())),
            name=name,
            not_after=until,
            scopes=frozenset(scopes) or ANY,
            models=frozenset(models) or ANY,
        )
        # What would not be read back must not be written.
        TrustEntry.from_json(entry.to_json())
    except FormatError as error:
        raise click.BadParameter(str(error)) from error
    with _changing(home) as keyring:
        keyring.add(entry)
    if as_json:
        print_json(entry.to_json())
    else:
        print_facts(
            [
                ("trusted", entry.name),
                ("fingerprint", fingerprint(entry.key_id)),
                ("key id", entry.key_id),
                ("scopes", _names(entry.scopes)),
                ("models", _names(entry.models)),
                ("until", _until(entry.not_after)),
            ]
        )


@click.command()
@click.argument("key_id")
@home_option
@json_option
def remove(key_id: str, home: Path, *, as_json: bool) -> None:
    """Trust a key no longer.

    KEY_ID is as `kvport trust list` prints it. State that was imported before stays.
    """
    try:
        parsed = parse_key_id(key_id)
    except FormatError as error:
        raise click.BadParameter(str(error), param_hint="KEY_ID") from error
    with _changing(home) as keyring:
        removed = keyring.remove(parsed)
    if not removed:
        raise NotListedError("no entry of the trust list has this key id")
    if as_json:
        print_json({"key_id": parsed})
    else:
        click.echo(f"no longer trusted: {parsed}")


@contextlib.contextmanager
def _changing(home: Path) -> Iterator[Keyring]:
    """The keyring, while no other command changes it; a server need not stop."""
    keyring = Keyring(home)
    keyring.create()
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield keyring
    finally:
        os.close(descriptor)


def _names(names: frozenset[str]) -> str:
    return "all" if names == ANY else ", ".join(sorted(names))


def _until(time: datetime) -> str:
    return "for ever" if time == ALWAYS[1] else format_time(time)
