"""The key files of a home: who this node is, and whom it trusts.

    <home>/keys/signing.key    seed of the Ed25519 key, 64 hex digits
    <home>/keys/api.key        bearer key of the HTTP API, 32 random bytes in base64url
    <home>/keys/cache.key      key of the cache's MACs, 64 hex digits
    <home>/keys/recipient.key  opens what is sealed for us (X25519), 64 hex digits
    <home>/keys/sealing.key    where keys of sealed blobs come from, 64 hex digits
    <home>/trust.json          the allow-list (kvport.manifest.trust), canonical JSON
    <home>/equivalences.json   versions that are taken for ours, canonical JSON

* All are 0600, in 0700 directories, written durably and whole.
* A file that others may touch, that another user owns, or that is a link is refused.
* Keys are made once. With the signing key its own trust entry is made, so that a home
  trusts itself; an entry that was removed later stays away.
* Nothing is cached: `load_trust` reads the file, and callers do so per import.

Whoever changes a home holds its lock; readers need none.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from kvport.manifest.digests import parse_hex32
from kvport.manifest.equivalence import NONE, Equivalence, Equivalences
from kvport.manifest.errors import FormatError, KvportError, OwnKeyError
from kvport.manifest.identity import KeyId
from kvport.manifest.keys import SigningKey
from kvport.manifest.limits import EQUIVALENCE_BYTES, TRUST_BYTES
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.trust import Revocation, TrustEntry, TrustList
from kvport.snapshot.durable import fsync_directory, write_atomic, write_once
from kvport.snapshot.errors import KeyFileError

OWN_NAME: Final = "this node"
"""Name of a home's own entry in its trust list."""

_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_OTHERS: Final = 0o077
_KEY_FILE_BYTES: Final = 128
L = TypeVar("L")

_API_KEY: Final = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)


class Keyring:
    """The key files of one home."""

    def __init__(self, home: Path) -> None:
        """The keyring of a home; touches nothing yet."""
        self._home = home
        self._signing = home / "keys" / "signing.key"
        self._api = home / "keys" / "api.key"
        self._cache = home / "keys" / "cache.key"
        self._recipient = home / "keys" / "recipient.key"
        self._sealing = home / "keys" / "sealing.key"
        self._trust = home / "trust.json"
        self._equivalences = home / "equivalences.json"

    def create(self) -> None:
        """Make what is missing: directories, keys, and a trust list with our key.

        Raises:
            KeyFileError: an existing file is not fit for use.
            OSError: the home cannot be written.
        """
        for directory in (self._home, self._home / "keys"):
            _make_directory(directory)
        if not self._signing.exists():
            key = SigningKey.generate()
            # The entry first: a crash between the two leaves no key that is untrusted.
            self.add(TrustEntry(public_key=key.public, name=OWN_NAME))
            _write_key(self._signing, key.to_bytes().hex())
        if not self._api.exists():
            _write_key(self._api, secrets.token_urlsafe(32))
        for path in (self._cache, self._recipient, self._sealing):
            if not path.exists():
                _write_key(path, secrets.token_hex(32))

    def signing_key(self) -> SigningKey:
        """The key that this node signs artifacts with.

        Raises:
            KeyFileError: there is none, or its file is not fit for use.
        """
        return SigningKey.from_bytes(_read_secret(self._signing, "signing key"))

    def recipient_key(self) -> RecipientKey:
        """The key that opens what is sealed for this node.

        Raises:
            KeyFileError: there is none, or its file is not fit for use.
        """
        return RecipientKey.from_bytes(_read_secret(self._recipient, "recipient's key"))

    def sealing_secret(self) -> bytes:
        """The secret from which keys of sealed blobs come, 32 bytes.

        Raises:
            KeyFileError: there is none, or its file is not fit for use.
        """
        return _read_secret(self._sealing, "sealing secret")

    def api_key(self) -> str:
        """The bearer key of the HTTP API.

        Raises:
            KeyFileError: there is none, or its file is not fit for use.
        """
        text = _read_key(self._api)
        if not _API_KEY.fullmatch(text):
            raise KeyFileError("the API key is not 43 base64url characters")
        return text

    def cache_mac_key(self) -> bytes:
        """The key that rows of the cache's index are held to, 32 bytes.

        Raises:
            KeyFileError: there is none, or its file is not fit for use.
        """
        return _read_secret(self._cache, "cache's key")

    def load_trust(self) -> TrustList:
        """The trust list as it is now; empty, which trusts nobody, if there is none.

        Raises:
            KeyFileError: the file is not fit for use.
        """
        data = _read(self._trust, TRUST_BYTES)
        if data is None:
            return TrustList()
        return _decode(data, TrustList.from_json, "the trust list")

    def load_equivalences(self) -> Equivalences:
        """The equivalence pairs as they are now; none if there is no file.

        Raises:
            KeyFileError: the file is not fit for use.
        """
        data = _read(self._equivalences, EQUIVALENCE_BYTES)
        if data is None:
            return NONE
        return _decode(data, Equivalences.decode, "the list of equivalences")

    def accept(self, pair: Equivalence) -> None:
        """Take other versions for ours, from the next import on.

        Raises:
            KeyFileError: the present list is not fit for use.
        """
        pairs = self.load_equivalences().with_pair(pair)
        write_atomic(self._equivalences, pairs.encode(), _FILE_MODE)

    def add(self, entry: TrustEntry) -> None:
        """Trust a key, in place of what was said about it before.

        Raises:
            KeyFileError: the present list is not fit for use.
            LimitExceededError: the list would be too long.
            RevokedKeyError: the key is revoked.
        """
        self._save(self.load_trust().with_entry(entry))

    def remove(self, key_id: KeyId) -> bool:
        """Trust a key no longer.

        Returns:
            Whether it was trusted before.

        Raises:
            KeyFileError: the present list is not fit for use.
        """
        before = self.load_trust()
        if (after := before.without(key_id)) == before:
            return False
        self._save(after)
        return True

    def revoke(self, revocation: Revocation) -> bool:
        """Believe a key never again; what it brought is to be purged then.

        Returns:
            Whether it was not revoked before.

        Raises:
            KeyFileError: the present list, or the signing key, is not fit for use.
            LimitExceededError: the list would be too long.
            OwnKeyError: it is this node's own.
        """
        if revocation.key_id == self.signing_key().public.key_id:
            raise OwnKeyError("this machine's own key cannot be revoked here")
        before = self.load_trust()
        after = before.revoke([revocation])
        self._save(after)
        return after.revoked_keys != before.revoked_keys

    def adopt(self, envelope: bytes, now: datetime) -> tuple[TrustList, TrustList]:
        """Believe a signed trust document: see `TrustList.adopt`.

        Returns:
            The list before, and the list from now on.

        Raises:
            KeyFileError: the present list, or the signing key, is not fit for use.
            KvportError: another subclass, as of `TrustList.adopt`; nothing changed.
        """
        before = self.load_trust()
        own_key = self.signing_key().public.key_id
        after = before.adopt(envelope, now=now, own_key=own_key)
        self._save(after)
        return before, after

    def _save(self, trust: TrustList) -> None:
        write_atomic(self._trust, trust.to_json(), _FILE_MODE)


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        fsync_directory(path.parent)


def _write_key(path: Path, text: str) -> None:
    write_once(path, f"{text}\n".encode("ascii"), _FILE_MODE)


def _read_key(path: Path) -> str:
    data = _read(path, _KEY_FILE_BYTES)
    if data is None:
        raise KeyFileError("a key file is missing")
    return data.decode("ascii", "replace").removesuffix("\n")


def _decode(data: bytes, decode: Callable[[bytes], L], what: str) -> L:
    try:
        return decode(data)
    except KvportError as error:
        raise KeyFileError(f"{what} is damaged") from error


def _read_secret(path: Path, what: str) -> bytes:
    try:
        return parse_hex32(_read_key(path))
    except FormatError as error:
        raise KeyFileError(f"the {what} is not 64 hex digits") from error


def _read(path: Path, limit: int) -> bytes | None:
    """Content of a private file of ours, None if there is none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else "cannot be opened"
        raise KeyFileError(f"{path.name} {what}") from error
    try:
        # The file that is open is looked at, not whatever has its name by now.
        _check_private(os.fstat(fd), path.name)
        data = os.read(fd, limit + 1)
    finally:
        os.close(fd)
    if len(data) > limit:
        raise KeyFileError(f"{path.name} is too long")
    return data


def _check_private(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{name} is not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"{name} belongs to another user")
    if status.st_mode & _OTHERS:
        raise KeyFileError(f"{name} may be read or written by others")
