"""`kvport keys`: the key that a home signs with."""

from pathlib import Path

import rich_click as click

from kvport.api.cli.errors import NoHomeError
from kvport.api.cli.options import home_option
from kvport.api.cli.output import fingerprint, json_option, print_facts, print_json
from kvport.snapshot.keyring import Keyring


@click.command()
@home_option
@json_option
def show(home: Path, *, as_json: bool) -> None:
    """The public key, to be trusted on other machines.

    On the other machine: `kvport trust add PUBLIC_KEY --name NAME`. Compare the
    fingerprints that both commands print, over a channel that you trust.
    """
    _print(home, as_json=as_json)


@click.command()
@home_option
@json_option
def init(home: Path, *, as_json: bool) -> None:
    """Make the home and its keys, if there are none.

    `kvport serve` does it too; this is for pairing machines before the first start.
    """
    Keyring(home).create()
    _print(home, as_json=as_json)


def _print(home: Path, *, as_json: bool) -> None:
    if not home.exists():
        raise NoHomeError("this home does not exist")
    public = Keyring(home).signing_key().public
    if as_json:
        print_json({"key_id": public.key_id, "public_key": public.raw.hex()})
        return
    print_facts(
        [
            ("key id", public.key_id),
            ("fingerprint", fingerprint(public.key_id)),
            ("public key", public.raw.hex()),
        ]
    )
