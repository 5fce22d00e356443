"""`kvport inspect` and `kvport verify`: files, without a server, a model or mlx."""

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

import rich_click as click

from kvport.api.cli.container import Counted, declared_size
from kvport.api.cli.described import facts, summary
from kvport.api.cli.errors import NoHomeError, check_readable, naming
from kvport.api.cli.here import how_it_fits
from kvport.api.cli.options import FILE, home_option
from kvport.api.cli.output import (
    json_option,
    print_facts,
    print_json,
    say,
)
from kvport.manifest.identity import KeyId, fingerprint
from kvport.manifest.model import Manifest
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.sealed import SealedManifest
from kvport.manifest.signed import SealedArtifact
from kvport.snapshot.errors import KeyFileError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.transfer.archive import inspect_file, verify_file
from kvport.snapshot.units import format_bytes


@click.command()
@click.argument("file", type=FILE)
@home_option
@json_option
def inspect(file: Path, home: Path, *, as_json: bool) -> None:
    """Show what a file is, without a server.

    Believes what FILE says about itself; `kvport verify` checks it. Says too what an
    import would run into here: whether the home trusts the signer, and which models
    that were served on it the state fits.
    """
    with naming(file), _opened(file) as stream:
        counted = Counted(stream)
        inspection = inspect_file(cast("BinaryIO", counted))
        size = counted.size()
    manifest = inspection.manifest
    declared = declared_size(manifest, counted.head)
    here = how_it_fits(inspection, home)
    if as_json:
        head = {
            "artifact_id": inspection.artifact_id,
            "signers": inspection.signers,
            "fingerprints": [fingerprint(signer) for signer in inspection.signers],
            "size_bytes": size,
            "declared_bytes": declared,
            "complete": size == declared,
        }
        fit = None if here is None else here.to_json()
        print_json(head | summary(manifest) | {"here": fit})
        return
    print_facts(
        [
            ("artifact", inspection.artifact_id),
            *facts(manifest),
            *(("signed by", fingerprint(signer)) for signer in inspection.signers),
            *([] if here is None else here.facts()),
        ]
    )
    if size != declared:
        difference = "cut short" if size < declared else "followed by something else"
        say(f"The file is {difference}: {size} bytes of {declared}.")
    say("Nothing of this is verified yet: see `kvport verify`.")


@click.command()
@click.argument("file", type=FILE)
@home_option
@json_option
def verify(file: Path, home: Path, *, as_json: bool) -> None:
    """Check every byte, without a server.

    Signature, trust, expiry, token ids and every blob of FILE, as an import checks
    them, under the trust list of the home. Whether it fits a model, only a server that
    holds the model can tell.
    """
    check_readable(file)
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    keyring = Keyring(home)
    with naming(file), _opened(file) as stream:
        verified = verify_file(
            stream,
            trust=keyring.load_trust(),
            now=datetime.now(UTC),
            own_key=_own_key(keyring),
            recipient=_recipient(keyring),
        )
    manifest: Manifest | SealedManifest
    if isinstance(verified, SealedArtifact):
        manifest = verified.sealed
    else:
        manifest = verified.manifest
    if as_json:
        print_json(
            {"artifact_id": verified.artifact_id, "size_bytes": verified.size}
            | summary(manifest)
        )
        return
    print_facts(
        [
            ("verified", verified.artifact_id),
            ("size", format_bytes(verified.size)),
            *facts(manifest),
        ]
    )
    if isinstance(verified, SealedArtifact):
        say("It is sealed for others: what is inside was not looked at.")


def _own_key(keyring: Keyring) -> KeyId | None:
    """This machine's key, which the file may be meant for; without one it is nobody."""
    try:
        return keyring.signing_key().public.key_id
    except KeyFileError:
        return None


def _recipient(keyring: Keyring) -> RecipientKey | None:
    """What opens a sealed file that is for this machine."""
    try:
        return keyring.recipient_key()
    except KeyFileError:
        return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path == Path("-"):
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        yield file
