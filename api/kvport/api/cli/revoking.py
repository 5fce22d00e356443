"""`kvport trust revoke` and `kvport trust documents`: what is not believed any more.

The list is written first, then everything that came from the key is purged, through the
server that runs on the home, or here. If the second step fails, the next start does it.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import rich_click as click

from kvport.api.cli.errors import naming
from kvport.api.cli.options import DURATION, FILE, Server, home_option
from kvport.api.cli.output import (
    json_option,
    print_facts,
    print_json,
    say,
)
from kvport.api.cli.reach import Place, reached
from kvport.api.cli.trusted import any_key, changing, meant, name_of, need_home
from kvport.api.files import open_destination
from kvport.api.run_file import is_locked
from kvport.manifest.errors import FormatError, KvportError, UntrustedKeyError
from kvport.manifest.identity import KeyId, fingerprint
from kvport.manifest.limits import TRUST_DOCUMENT_BYTES
from kvport.manifest.timestamps import format_time
from kvport.manifest.trust import (
    Adopted,
    Revocation,
    Role,
    TrustDocument,
    TrustEntry,
    TrustList,
)
from kvport.snapshot.errors import MissingRootError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.known_roots import KnownRoots
from kvport.snapshot.units import format_bytes

_FILE_BYTES: Final = 2 * TRUST_DOCUMENT_BYTES
"""More than an envelope around a document takes."""
_MONTH: Final = 30 * 86_400


@click.command()
@click.argument("key")
@click.option("--reason", default="", help="Why, for people.")
@home_option
@json_option
def revoke(key: str, *, reason: str, home: Path, as_json: bool) -> None:
    """Never trust a key again, and do away with all that came from it.

    KEY is its name, fingerprint or key id; a whole key or key id need not be listed.
    State that was imported from it goes at once, with all that was computed on top,
    pinned or not, and cannot be exported any more; running requests that use it end.
    That cannot be taken back.
    """
    need_home(home)
    with changing(home) as keyring:
        trust = keyring.load_trust()
        key_id = any_key(key, trust)
        name = name_of(key_id, trust)
        revocation = Revocation(
            key_id=key_id, at=datetime.now(UTC).replace(microsecond=0), reason=reason
        )
        _check(revocation)
        keyring.revoke(revocation)
    done = purge(home)
    if as_json:
        print_json({"key_id": key_id, **done})
        return
    click.echo(f"revoked: {name} ({fingerprint(key_id)})")
    _print_purged(done)


@click.command()
@click.argument("file", type=FILE)
@home_option
@json_option
def apply(file: Path, *, home: Path, as_json: bool) -> None:
    """Believe a signed trust document.

    FILE must be signed by a key that has the role `trust` here. Keys that it lists are
    trusted within what the signer is trusted with, in place of those of the signer's
    document before; keys that it revokes are revoked for ever, as by `revoke`.
    """
    need_home(home)
    with click.open_file(str(file), "rb") as opened:
        data = opened.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise FormatError("the file is longer than any trust document")
    with naming(file), changing(home) as keyring:
        before, after = keyring.adopt(data, datetime.now(UTC))
    (adopted,) = set(after.documents) - set(before.documents) or [None]
    new = len(after.revoked) - len(before.revoked)
    done = purge(home) if new else {}
    if as_json:
        changed = None if adopted is None else adopted.to_json()
        print_json({"document": changed, "newly_revoked": new, **done})
        return
    if adopted is None:
        click.echo("This document was applied before.")
        return
    _print_document(adopted, after, new)
    if new:
        _print_purged(done)


@click.command()
@click.option(
    "-o",
    "--output",
    type=FILE,
    required=True,
    help="Where the document goes; `-` is standard output.",
)
@click.option(
    "--entry",
    "keys",
    multiple=True,
    metavar="KEY",
    help="A key of this list that it gives, by name, fingerprint or key id"
    " (repeatable; all that were added here unless given).",
)
@click.option(
    "--expires",
    "seconds",
    type=DURATION,
    default=_MONTH,
    show_default="30d",
    help="After how long the keys that it gives are trusted no longer.",
)
@home_option
@json_option
def sign(
    *, output: Path, keys: tuple[str, ...], seconds: int, home: Path, as_json: bool
) -> None:
    """Write what this machine's list says, for others to believe.

    They do if they gave this machine's key the role `trust`; this list must give it
    too. The document lists keys for exporting, and all keys that are revoked here. It
    takes the place of the one before, and holds here as well.
    """
    need_home(home)
    now = datetime.now(UTC).replace(microsecond=0)
    with changing(home) as keyring:
        signer, trust = keyring.signing_key(), keyring.load_trust()
        own = signer.public.key_id
        _check_author(own, trust)
        before = trust.document(own)
        document = TrustDocument(
            issuer=own,
            version=before.version + 1 if before else 1,
            created=now,
            expires=now + timedelta(seconds=seconds),
            entries=_chosen(trust, own, keys),
            revoked=trust.revoked,
        )
        envelope = document.sign([signer])
        # First here, so that no version is given twice.
        _, after = keyring.adopt(envelope, now)
    to: Path | BinaryIO = sys.stdout.buffer if output == Path("-") else output
    with open_destination(to) as opened:
        opened.write(envelope)
    adopted = after.document(own)
    if output == Path("-") or adopted is None:
        return
    if as_json:
        print_json({"document": adopted.to_json(), "file": str(output)})
    else:
        _print_document(adopted, after, len(document.revoked))


def purge(home: Path) -> dict[str, Any]:
    """Do away with what the home's list revokes; what was done, as over HTTP.

    Raises:
        KvportError: it could not be done now; the next start does it.
    """
    try:
        return _purge(home)
    except KvportError:
        say("The key is revoked. What came from it goes with the next start at last:")
        raise


def _purge(home: Path) -> dict[str, Any]:
    server = Server(home, None, None)
    if is_locked(home):
        with reached(Place(server, None)) as admin:
            return admin.purge()
    total: Counter[str] = Counter(freed_bytes=0, removed_segments=0, kept_segments=0)
    done: dict[str, Any] = {
        "revoked_keys": len(Keyring(home).load_trust().revoked),
        "cache": dict(total),
        "ended_requests": 0,
        "forgotten_artifacts": 0,
    }
    for root in KnownRoots(home).all():
        try:
            with reached(Place(server, root)) as admin:
                found = admin.purge()
        except MissingRootError as error:
            say(f"{error.message}; it is purged before it is used again")
            continue
        total.update(found["cache"])
        done["cache"] = dict(total)
        done["forgotten_artifacts"] += found["forgotten_artifacts"]
    return done


def _check(revocation: Revocation) -> None:
    """What would not be read back must not be written."""
    try:
        Revocation.from_json(revocation.to_json())
    except FormatError as error:
        raise click.BadParameter(str(error), param_hint="--reason") from error


def _check_author(own: KeyId, trust: TrustList) -> None:
    entry = trust.entry(own)
    if entry is None or Role.TRUST not in entry.roles:
        raise UntrustedKeyError(
            "this machine's key does not have the role `trust` in its own list: add it"
            " there with `kvport trust add --role export --role trust`"
        )


def _chosen(
    trust: TrustList, own: KeyId, keys: tuple[str, ...]
) -> tuple[TrustEntry, ...]:
    """The operator's entries that are to be given, as entries for exporting."""
    chosen = {meant(key, TrustList(trust.entries)) for key in keys}
    return tuple(
        attrs.evolve(entry, roles=frozenset({Role.EXPORT}))
        for entry in trust.entries
        if (entry.key_id in chosen if keys else entry.key_id != own)
        and Role.EXPORT in entry.roles
        and entry.key_id not in trust.revoked_keys
    )


def _print_document(adopted: Adopted, trust: TrustList, revoked: int) -> None:
    issuer = name_of(adopted.issuer, trust)
    print_facts(
        [
            ("document of", f"{issuer} ({fingerprint(adopted.issuer)})"),
            ("version", str(adopted.version)),
            ("keys", ", ".join(entry.name for entry in adopted.entries) or "none"),
            ("until", format_time(adopted.expires)),
            ("revoked", str(revoked)),
        ]
    )


def _print_purged(done: Mapping[str, Any]) -> None:
    if (cache := done["cache"]) is None:
        say("The cache is not there now; it is purged before it is used again.")
    else:
        size = format_bytes(cache["freed_bytes"])
        click.echo(f"{size} freed, {cache['removed_segments']} segments removed")
    if count := done["ended_requests"]:
        click.echo(f"{count} running requests ended")
    if count := done["forgotten_artifacts"]:
        click.echo(f"{count} artifacts forgotten")
