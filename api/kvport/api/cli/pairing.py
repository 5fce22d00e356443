"""Pairing: how a key comes here, and who says that it is the right one.

In: what the user gave. Out: a public key that somebody vouched for: a person who
compared fingerprints, or ssh, which knows the other machine.
"""

import re
import subprocess
import sys
import threading
from typing import Final

import rich_click as click

from kvport.api.cli.errors import FingerprintError, PairingError
from kvport.api.cli.output import is_fingerprint, say
from kvport.manifest.canonical import unambiguous_loads
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import FormatError
from kvport.manifest.fields import take, take_exact
from kvport.manifest.identity import fingerprint
from kvport.manifest.keys import PublicKey

_ADDRESS: Final = re.compile(r"[\w.+][\w.+-]*@[\w.\[][\w.:%\[\]-]*", re.ASCII)
"""No leading dash: ssh would take it for an option."""
_OUTPUT_BYTES: Final = 4096
_SECONDS: Final = 120


def is_address(text: str) -> bool:
    """Whether it names a machine to be asked, and not a key."""
    return "@" in text


def over_ssh(address: str) -> PublicKey:
    """The public key that `kvport keys show` prints on another machine.

    ssh tells which machine that is, and may ask its user on the terminal.

    Args:
        address: USER@HOST, as ssh takes it.

    Raises:
        PairingError: ssh failed, or something else was printed.
        WeakKeyError: the key is weak.
    """
    if not _ADDRESS.fullmatch(address):
        raise click.BadParameter("not USER@HOST", param_hint="PUBLIC_KEY")
    # No shell here; over there it gets words without anything that it could read.
    command = ["ssh", "--", address, "kvport", "keys", "show", "--json"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise PairingError("there is no `ssh` to ask with") from error
    timer = threading.Timer(_SECONDS, process.kill)
    timer.start()
    try:
        with process:
            output = process.stdout.read(_OUTPUT_BYTES + 1) if process.stdout else b""
            if len(output) > _OUTPUT_BYTES:
                process.kill()
    finally:
        timer.cancel()
    if len(output) > _OUTPUT_BYTES:
        raise PairingError("the other machine said more than `kvport keys show` does")
    if process.returncode:
        raise PairingError(f"ssh ended with status {process.returncode}")
    return _parse(output)


def confirmed(public: PublicKey, expected: str | None, *, yes: bool) -> None:
    """Have someone vouch for a key that was carried here.

    Args:
        public: the key.
        expected: its fingerprint, as the other machine shows it; None if not given.
        yes: whether the user vouches without being asked.

    Raises:
        FingerprintError: it is another key.
    """
    shown = fingerprint(public.key_id)
    if expected is not None:
        check_fingerprint(public, expected)
    elif not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "Without a terminal to ask on, --fingerprint or --yes is needed:"
                " compare what `kvport keys show` prints on the other machine."
            )
        say(f"fingerprint  {shown}")
        click.confirm(
            "Does `kvport keys show` print the same on the other machine?",
            abort=True,
            err=True,
        )


def check_fingerprint(public: PublicKey, expected: str) -> None:
    """Compare a key with a fingerprint, spaced or not.

    Raises:
        FingerprintError: it is another key.
    """
    if not is_fingerprint(expected):
        raise click.BadParameter(
            "not a fingerprint: 32 hex digits, as `kvport keys show` prints them",
            param_hint="--fingerprint",
        )
    shown = fingerprint(public.key_id)
    if expected.replace(" ", "").lower() != shown.replace(" ", ""):
        raise FingerprintError(f"the key's fingerprint is {shown}, not the given one")


def _parse(output: bytes) -> PublicKey:
    try:
        data = take_exact(
            unambiguous_loads(output), ["fingerprint", "key_id", "public_key"]
        )
        public = PublicKey(parse_hex32(take(data, "public_key", str)))
    except FormatError as error:
        raise PairingError("the other machine printed something else") from error
    names = (public.key_id, fingerprint(public.key_id))
    if (data["key_id"], data["fingerprint"]) != names:
        raise PairingError("the other machine printed names that are not its key's")
    return public
