"""A home's trust list as commands name, change and print it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvport.api.cli.errors import NoHomeError, NotListedError
from kvport.manifest.digests import parse_hex32
from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId, fingerprint
from kvport.manifest.keys import PublicKey, parse_key_id
from kvport.manifest.trust import ANY, TrustList
from kvport.snapshot import home_lock
from kvport.snapshot.keyring import Keyring


def need_home(home: Path) -> None:
    """Refuse a home that is not there.

    Raises:
        NoHomeError: it is not.
    """
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")


@contextlib.contextmanager
def changing(home: Path) -> Iterator[Keyring]:
    """The keyring, while no other command changes it; a server need not stop."""
    keyring = Keyring(home)
    keyring.create()
    with home_lock.changing(home):
        yield keyring


def meant(key: str, trust: TrustList) -> KeyId:
    """The listed key with this key id, fingerprint or name.

    Raises:
        NotListedError: there is none, or several have the name.
    """
    names = {(entry.key_id, entry.name) for entry in (*trust.entries, *trust.given)}
    names |= {(one.key_id, "") for one in trust.revoked}
    digits = key.replace(" ", "").lower()
    found = {
        key_id
        for key_id, name in names
        if key in {key_id, name} or digits == fingerprint(key_id).replace(" ", "")
    }
    if not found:
        raise NotListedError("no entry of the trust list has this name or key")
    if len(found) > 1:
        raise NotListedError(
            f"{len(found)} keys are listed by this name; name one by its fingerprint"
        )
    return found.pop()


def any_key(key: str, trust: TrustList) -> KeyId:
    """As `meant`; also a key that is not listed, by its id or as it is.

    Raises:
        NotListedError: it is neither listed nor a whole key or key id.
    """
    text = key.strip().lower()
    with contextlib.suppress(KvportError):
        return parse_key_id(text)
    with contextlib.suppress(KvportError):
        return PublicKey(parse_hex32(text)).key_id
    return meant(key, trust)


def name_of(key_id: KeyId, trust: TrustList) -> str:
    """What people call a key; its fingerprint, if it is not listed."""
    entry = trust.entry(key_id)
    return entry.name if entry and entry.name else fingerprint(key_id)


def show_names(names: frozenset[str]) -> str:
    """A set of scopes or models, for people."""
    return "all" if names == ANY else ", ".join(sorted(names)) or "none"
