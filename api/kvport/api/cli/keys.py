"""`kvport keys`: the keys that a home signs with, and that others seal for."""

from pathlib import Path

import rich_click as click

from kvport.api.cli.errors import NoHomeError
from kvport.api.cli.options import home_option
from kvport.api.cli.output import json_option, print_facts, print_json
from kvport.manifest.identity import fingerprint
from kvport.manifest.keys import PublicKey
from kvport.manifest.recipients import Recipient
from kvport.snapshot.keyring import Keyring


@click.command()
@home_option
@click.option(
    "--public-key", "only_key", is_flag=True, help="Print the public key, nothing else."
)
@json_option
def show(home: Path, *, only_key: bool, as_json: bool) -> None:
    """The public key, to be trusted on other machines.

    On the other machine: `kvport trust add PUBLIC_KEY --name NAME`. Compare the
    fingerprints that both commands print, over a channel that you trust.
    """
    _print(_public_key(home), only_key=only_key, as_json=as_json)


@click.command()
@home_option
@json_option
def init(home: Path, *, as_json: bool) -> None:
    """Make the home and its keys, if there are none.

    `kvport serve` does it too; this is for pairing machines before the first start.
    """
    Keyring(home).create()
    _print(_public_key(home), as_json=as_json)


@click.command()
@home_option
@click.option(
    "--public-key", "only_key", is_flag=True, help="Print the public key, nothing else."
)
@json_option
def recipient(home: Path, *, only_key: bool, as_json: bool) -> None:
    """The public key that files are sealed for.

    Only this home opens them. On the other machine: `kvport export --to PUBLIC_KEY`.
    It is no secret, but whoever gives out another in its place reads what is sealed:
    compare fingerprints.
    """
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    public = Keyring(home).recipient_key().public
    _print(public, only_key=only_key, as_json=as_json)


def _print(
    public: PublicKey | Recipient, *, as_json: bool, only_key: bool = False
) -> None:
    if only_key and not as_json:
        click.echo(public.raw.hex())
        return
    facts = {
        "key_id": public.key_id,
        "fingerprint": fingerprint(public.key_id),
        "public_key": public.raw.hex(),
    }
    if as_json:
        print_json(facts)
    else:
        print_facts((name.replace("_", " "), value) for name, value in facts.items())


def _public_key(home: Path) -> PublicKey:
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    return Keyring(home).signing_key().public
