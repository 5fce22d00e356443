"""`kvport trust`: the allow-list of a home.

A server reads the list for every import, so a change counts from the next one on.
"""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import rich_click as click

from kvport.api.cli.errors import NoHomeError, NotListedError
from kvport.api.cli.options import home_option
from kvport.api.cli.output import (
    is_fingerprint,
    json_option,
    print_facts,
    print_json,
    print_table,
)
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError
from kvport.manifest.identity import fingerprint
from kvport.manifest.keys import PublicKey
from kvport.manifest.timestamps import ALWAYS, format_time
from kvport.manifest.trust import ANY, TrustEntry, TrustList
from kvport.snapshot.home_lock import changing
from kvport.snapshot.keyring import Keyring

_NAMES_HELP = " (repeatable; all unless given)"


@click.command("list")
@home_option
@json_option
def list_(home: Path, *, as_json: bool) -> None:
    """Keys that are trusted, and with what.

    A new home trusts its own key, "this node", and no other.
    """
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    entries = Keyring(home).load_trust().entries
    if as_json:
        print_json({"trust": [_to_json(entry) for entry in entries]})
        return
    print_table(
        ("name", "fingerprint", "scopes", "models", "until"),
        (
            (
                entry.name,
                fingerprint(entry.key_id),
                _names(entry.scopes),
                _names(entry.models),
                _until(entry.not_after),
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

    PUBLIC_KEY is what `kvport keys show` prints there: 64 hex digits. Files that it
    signs are imported from now on. What was said about the same key before is replaced.
    """
    until = expires.replace(tzinfo=UTC) if expires else ALWAYS[1]
    if until <= datetime.now(UTC):
        raise click.BadParameter("that time is over", param_hint="--expires")
    entry = TrustEntry(
        public_key=_public_key(public_key),
        name=name,
        not_after=until,
        scopes=frozenset(scopes) or ANY,
        models=frozenset(models) or ANY,
    )
    _check(entry)
    with _changing(home) as keyring:
        keyring.add(entry)
    if as_json:
        print_json(_to_json(entry))
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
@click.argument("key")
@home_option
@json_option
def remove(key: str, home: Path, *, as_json: bool) -> None:
    """Trust a key no longer.

    KEY is its name, fingerprint or key id, as `kvport trust list` shows it. State that
    was imported before stays.
    """
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    with _changing(home) as keyring:
        entry = _meant(key, keyring.load_trust())
        keyring.remove(entry.key_id)
    if as_json:
        print_json({"key_id": entry.key_id})
    else:
        click.echo(f"no longer trusted: {entry.name} ({fingerprint(entry.key_id)})")


def _public_key(text: str) -> PublicKey:
    try:
        return PublicKey(parse_hex32(text.strip().lower()))
    except FormatError as error:
        if text.startswith("ed25519:"):
            what = "that is a key id, not the public key itself"
        elif is_fingerprint(text):
            what = "that is a fingerprint, not the public key itself"
        else:
            what = "not a public key"
        raise click.BadParameter(
            f"{what}: give the 64 hex digits that `kvport keys show` prints on the"
            " other machine",
            param_hint="PUBLIC_KEY",
        ) from error


def _check(entry: TrustEntry) -> None:
    """What would not be read back must not be written."""
    plain = TrustEntry(public_key=entry.public_key, name="-")
    options = {
        "--name": attrs.evolve(plain, name=entry.name),
        "--scope": attrs.evolve(plain, scopes=entry.scopes),
        "--model": attrs.evolve(plain, models=entry.models),
    }
    for option, part in options.items():
        try:
            TrustEntry.from_json(part.to_json())
        except FormatError as error:
            raise click.BadParameter(str(error), param_hint=option) from error


def _meant(key: str, trust: TrustList) -> TrustEntry:
    """The entry with this key id, fingerprint or name."""
    digits = key.replace(" ", "").lower()
    found = [
        entry
        for entry in trust.entries
        if key == entry.key_id
        or digits == fingerprint(entry.key_id).replace(" ", "")
        or key == entry.name
    ]
    if not found:
        raise NotListedError("no entry of the trust list has this name or key")
    if len(found) > 1:
        raise NotListedError(
            f"{len(found)} keys are listed by this name; name one by its fingerprint"
        )
    return found[0]


def _to_json(entry: TrustEntry) -> dict[str, Any]:
    return entry.to_json() | {"fingerprint": fingerprint(entry.key_id)}


@contextlib.contextmanager
def _changing(home: Path) -> Iterator[Keyring]:
    """The keyring, while no other command changes it; a server need not stop."""
    keyring = Keyring(home)
    keyring.create()
    with changing(home):
        yield keyring


def _names(names: frozenset[str]) -> str:
    return "all" if names == ANY else ", ".join(sorted(names))


def _until(time: datetime) -> str:
    return "for ever" if time == ALWAYS[1] else format_time(time)
