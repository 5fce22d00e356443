"""`kvport trust`: the allow-list of a home.

A server reads the list for every import, so a change counts from the next one on.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import rich_click as click

from kvport.api.cli.options import home_option
from kvport.api.cli.output import (
    is_fingerprint,
    json_option,
    print_facts,
    print_json,
    print_table,
)
from kvport.api.cli.pairing import check_fingerprint, confirmed, is_address, over_ssh
from kvport.api.cli.trusted import changing, meant, name_of, need_home, show_names
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError
from kvport.manifest.identity import fingerprint
from kvport.manifest.keys import PublicKey
from kvport.manifest.timestamps import ALWAYS, format_time
from kvport.manifest.trust import ANY, Role, TrustEntry, TrustList
from kvport.snapshot.keyring import Keyring

_NAMES_HELP = " (repeatable; all unless given)"


@click.command("list")
@home_option
@json_option
def list_(home: Path, *, as_json: bool) -> None:
    """Keys that are trusted, and with what; keys that are revoked.

    A new home trusts its own key, "this node", and no other.
    """
    need_home(home)
    trust = Keyring(home).load_trust()
    if as_json:
        print_json(_list_to_json(trust))
        return
    revoked = trust.revoked_keys
    own = {entry.key_id for entry in trust.entries}
    given = [entry for entry in trust.given if entry.key_id not in own]
    print_table(
        ("name", "fingerprint", "scopes", "models", "until"),
        (
            (
                entry.name,
                fingerprint(entry.key_id),
                show_names(entry.scopes),
                show_names(entry.models),
                "revoked" if entry.key_id in revoked else _until(entry.not_after),
            )
            for entry in (*trust.entries, *given)
        ),
    )
    for entry in trust.entries:
        if Role.TRUST in entry.roles and entry.key_id not in revoked:
            click.echo(f"{entry.name} may sign trust documents.")
    if trust.documents:
        click.echo()
        print_table(
            ("document of", ">version", ">keys", "until"),
            (
                (
                    name_of(one.issuer, trust), str(one.version),
                    str(len(one.entries)), format_time(one.expires),
                )
                for one in trust.documents
            ),
        )  # fmt: skip
    if trust.revoked:
        click.echo()
        print_table(
            ("revoked", "since", "reason"),
            (
                (fingerprint(one.key_id), format_time(one.at), one.reason)
                for one in trust.revoked
            ),
        )


@click.command()
@click.argument("public_key")
@click.option("--name", required=True, help="Whose key it is, for people.")
@click.option(
    "--fingerprint",
    "expected",
    metavar="DIGITS",
    help="What the other machine shows as its fingerprint; compared, not asked.",
)
@click.option("--yes", is_flag=True, help="Do not ask: the key is the right one.")
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
    "--role",
    "roles",
    type=click.Choice([role.value for role in Role]),
    multiple=True,
    default=[Role.EXPORT.value],
    show_default=True,
    help="What it may sign: files, or trust documents (repeatable).",
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
    expected: str | None,
    yes: bool,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    roles: tuple[str, ...],
    expires: datetime | None,
    home: Path,
    as_json: bool,
) -> None:
    """Trust the key of another machine.

    PUBLIC_KEY is what `kvport keys show` prints there: 64 hex digits; or USER@HOST,
    where that command is then run over ssh. Files that it signs are imported from now
    on. What was said about the same key before is replaced.

    Whoever exchanges a key on its way is trusted in its place: the fingerprint is shown
    and must be the one that the other machine shows.
    """
    until = expires.replace(tzinfo=UTC) if expires else ALWAYS[1]
    if until <= datetime.now(UTC):
        raise click.BadParameter("that time is over", param_hint="--expires")
    asked = is_address(public_key)
    entry = TrustEntry(
        public_key=over_ssh(public_key) if asked else _public_key(public_key),
        name=name,
        not_after=until,
        roles=frozenset(map(Role, roles)),
        scopes=frozenset(scopes) or ANY,
        models=frozenset(models) or ANY,
    )
    _check(entry)
    if not asked:
        confirmed(entry.public_key, expected, yes=yes)
    elif expected is not None:
        check_fingerprint(entry.public_key, expected)
    with changing(home) as keyring:
        keyring.add(entry)
    if as_json:
        print_json(_to_json(entry))
    else:
        print_facts(
            [
                ("trusted", entry.name),
                ("fingerprint", fingerprint(entry.key_id)),
                ("key id", entry.key_id),
                ("scopes", show_names(entry.scopes)),
                ("models", show_names(entry.models)),
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
    was imported before stays: `kvport trust revoke` does away with that as well.
    """
    need_home(home)
    with changing(home) as keyring:
        trust = keyring.load_trust()
        key_id = meant(key, TrustList(trust.entries))
        name = name_of(key_id, trust)
        keyring.remove(key_id)
    if as_json:
        print_json({"key_id": key_id})
    else:
        click.echo(f"no longer trusted: {name} ({fingerprint(key_id)})")


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


def _list_to_json(trust: TrustList) -> dict[str, Any]:
    return {
        "trust": [_to_json(entry) for entry in trust.entries],
        "given": [_to_json(entry) for entry in trust.given],
        "documents": [one.to_json() for one in trust.documents],
        "revoked": [
            one.to_json() | {"fingerprint": fingerprint(one.key_id)}
            for one in trust.revoked
        ],
    }


def _to_json(entry: TrustEntry) -> dict[str, Any]:
    return entry.to_json() | {"fingerprint": fingerprint(entry.key_id)}


def _until(time: datetime) -> str:
    return "for ever" if time == ALWAYS[1] else format_time(time)
