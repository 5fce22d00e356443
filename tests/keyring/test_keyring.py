import os
import stat
from pathlib import Path

import pytest

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.errors import UntrustedKeyError
from kvport.manifest.keys import SigningKey
from kvport.manifest.limits import MIB
from kvport.manifest.trust import Role, TrustEntry, TrustList
from kvport.snapshot.errors import KeyFileError
from kvport.snapshot.keyring import Keyring, _read
from tests.manifest.builder import NOW

NAMES = [
    "keys/signing.key",
    "keys/api.key",
    "keys/cache.key",
    "keys/recipient.key",
    "keys/sealing.key",
    "trust.json",
]
OTHER = TrustEntry(public_key=SigningKey.generate().public, name="mac-b")


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def keyring(home):
    keyring = Keyring(home)
    keyring.create()
    return keyring


def use(keyring, name):
    """Read the file of this name in the way it is used."""
    readers = [
        keyring.signing_key,
        keyring.api_key,
        keyring.cache_mac_key,
        keyring.recipient_key,
        keyring.sealing_secret,
        keyring.load_trust,
    ]
    return dict(zip(NAMES, readers, strict=True))[name]()


def test_a_home_trusts_itself(keyring):
    own = keyring.signing_key().public
    entry = keyring.load_trust().allows(own.key_id, now=NOW, role=Role.EXPORT)
    assert entry.public_key == own
    assert entry.allows_scope("default")
    assert entry.allows_model("any")


def test_files_and_directories_are_private_whatever_the_umask(home):
    before = os.umask(0)
    try:
        Keyring(home).create()
    finally:
        os.umask(before)
    found = {
        str(path.relative_to(home)): stat.S_IMODE(path.stat().st_mode)
        for path in home.rglob("*")
    }
    files = {*NAMES, "keys/recipient.key", "keys/sealing.key"}
    assert found == {"keys": 0o700, **dict.fromkeys(files, 0o600)}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_keys_are_made_once(keyring, home):
    before = {name: (home / name).read_bytes() for name in NAMES}
    Keyring(home).create()
    assert {name: (home / name).read_bytes() for name in NAMES} == before


def test_homes_have_different_keys(keyring, tmp_path):
    other = Keyring(tmp_path / "other")
    other.create()
    assert other.api_key() != keyring.api_key()
    assert other.cache_mac_key() != keyring.cache_mac_key()
    assert other.signing_key().public != keyring.signing_key().public
    assert other.recipient_key().public != keyring.recipient_key().public
    assert other.sealing_secret() != keyring.sealing_secret()


def test_the_api_key_has_32_random_bytes_that_fit_a_header(keyring):
    assert len(keyring.api_key()) == 43
    assert keyring.api_key().isascii()


def test_the_key_of_the_cache_has_32_random_bytes(keyring):
    assert len(keyring.cache_mac_key()) == 32


def test_nothing_is_made_by_reading(home):
    keyring = Keyring(home)
    for name in NAMES[:-1]:
        with pytest.raises(KeyFileError, match="missing"):
            use(keyring, name)
    assert keyring.load_trust() == TrustList()
    assert not home.exists()


def test_an_own_entry_that_was_removed_stays_away(keyring, home):
    own = keyring.signing_key().public.key_id
    assert keyring.remove(own)
    Keyring(home).create()
    with pytest.raises(UntrustedKeyError):
        keyring.load_trust().allows(own, now=NOW, role=Role.EXPORT)


def test_a_missing_trust_list_trusts_nobody(keyring, home):
    (home / "trust.json").unlink()
    Keyring(home).create()
    assert keyring.load_trust() == TrustList()


def test_a_crash_before_the_signing_key_leaves_a_home_that_trusts_itself(keyring, home):
    (home / "keys" / "signing.key").unlink()
    keyring.create()
    own = keyring.signing_key().public.key_id
    assert keyring.load_trust().allows(own, now=NOW, role=Role.EXPORT)


def test_entries_are_added_replaced_and_removed(keyring):
    before = keyring.load_trust()
    keyring.add(OTHER)
    assert set(keyring.load_trust().entries) == {*before.entries, OTHER}
    renamed = TrustEntry(public_key=OTHER.public_key, name="renamed")
    keyring.add(renamed)
    assert set(keyring.load_trust().entries) == {*before.entries, renamed}
    assert keyring.remove(OTHER.key_id)
    assert keyring.load_trust() == before
    assert not keyring.remove(OTHER.key_id)


def test_the_list_is_read_anew_each_time(keyring, home):
    Keyring(home).add(OTHER)
    assert OTHER in keyring.load_trust().entries


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_others_may_touch_is_refused(keyring, home, name, mode):
    (home / name).chmod(mode)
    with pytest.raises(KeyFileError, match="by others"):
        use(keyring, name)


def test_a_file_of_another_user_is_refused(tmp_path):
    foreign = Path("/etc/hosts")  # root's; for root, we make one
    if os.geteuid() == 0:
        foreign = tmp_path / "trust.json"
        foreign.touch(mode=0o600)
        os.chown(foreign, 12345, -1)
    with pytest.raises(KeyFileError, match="another user"):
        _read(foreign, 1024)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_refused(keyring, home, name):
    real = home / "real"
    (home / name).rename(real)
    (home / name).symlink_to(real)
    with pytest.raises(KeyFileError, match="link"):
        use(keyring, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_or_pipe_is_refused(keyring, home, name):
    (home / name).unlink()
    (home / name).mkdir(mode=0o700)
    with pytest.raises(KeyFileError, match="regular"):
        use(keyring, name)
    (home / name).rmdir()
    os.mkfifo(home / name, 0o600)
    with pytest.raises(KeyFileError, match="regular"):
        use(keyring, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, b"0" * 63, b"0" * 65, b"a" * 200, b"{}", b"A" * 64]
)
def test_a_damaged_file_is_refused(keyring, home, name, data):
    (home / name).write_bytes(data)
    with pytest.raises(KeyFileError):
        use(keyring, name)


@pytest.mark.parametrize(
    ("name", "size"), list(zip(NAMES, [*[129] * 5, MIB + 1], strict=True))
)
def test_a_file_that_is_too_long_is_refused(keyring, home, name, size):
    (home / name).write_bytes(b"0" * size)
    with pytest.raises(KeyFileError, match="too long"):
        use(keyring, name)


def test_a_damaged_list_is_not_overwritten(keyring, home):
    (home / "trust.json").write_bytes(b"{}")
    with pytest.raises(KeyFileError):
        keyring.add(OTHER)
    with pytest.raises(KeyFileError):
        keyring.remove(OTHER.key_id)
    assert (home / "trust.json").read_bytes() == b"{}"


def test_a_list_with_a_weak_key_is_refused(keyring, home):
    entry = {**OTHER.to_json(), "public_key": "01" + "00" * 31}
    document = {"entries": [entry], "format": "kvport-trust", "format_version": 1}
    (home / "trust.json").write_bytes(canonical_dumps(document))
    with pytest.raises(KeyFileError):
        keyring.load_trust()


def test_messages_hold_neither_keys_nor_paths(keyring, home):
    secret = "5" * 65
    (home / NAMES[0]).write_text(secret)
    with pytest.raises(KeyFileError) as caught:
        keyring.signing_key()
    assert secret not in str(caught.value)
    assert str(home) not in str(caught.value)
