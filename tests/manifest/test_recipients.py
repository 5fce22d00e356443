import pytest

from kvport.manifest.errors import DecryptionError, FormatError, WeakKeyError
from kvport.manifest.recipients import (
    WRAP_BYTES,
    Recipient,
    RecipientKey,
    parse_recipient_id,
)

P = 2**255 - 19
NONCE = bytes(range(16))


def test_a_wrap_opens_for_its_recipient_only():
    key, other = RecipientKey.generate(), RecipientKey.generate()
    wrapped = key.public.wrap(bytes(range(32)), NONCE)
    assert len(wrapped) == WRAP_BYTES
    assert key.unwrap(wrapped, NONCE) == bytes(range(32))
    with pytest.raises(DecryptionError):
        other.unwrap(wrapped, NONCE)
    with pytest.raises(DecryptionError):
        key.unwrap(wrapped, NONCE[::-1])
    for wrong in (b"", wrapped[:-1], wrapped + b"\0", bytes(WRAP_BYTES)):
        with pytest.raises(DecryptionError):
            key.unwrap(wrong, NONCE)


def test_wraps_of_one_key_differ():
    key = RecipientKey.generate()
    assert key.public.wrap(bytes(32), NONCE) != key.public.wrap(bytes(32), NONCE)


def test_a_key_is_restored_from_its_bytes():
    key = RecipientKey.generate()
    again = RecipientKey.from_bytes(key.to_bytes())
    assert again.public == key.public
    assert again.public.key_id == key.public.key_id
    assert key.to_bytes().hex() not in repr(key)


# Of orders 8 (two of them), 4, 2 and 1.
SMALL_ORDER = [
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    0,
    1,
]


@pytest.mark.parametrize("u", SMALL_ORDER)
def test_points_of_small_order_are_refused(u):
    with pytest.raises(WeakKeyError):
        Recipient(u.to_bytes(32, "little"))


@pytest.mark.parametrize("u", [P, P + 1, P + 9, 2**255 + 9, 2**256 - 1])
def test_second_encodings_are_refused(u):
    with pytest.raises(FormatError):
        Recipient(u.to_bytes(32, "little"))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_have_one_length(size):
    for make in (Recipient, RecipientKey.from_bytes):
        with pytest.raises(FormatError):
            make(bytes(size))


def test_ids_have_one_form():
    key_id = RecipientKey.generate().public.key_id
    assert parse_recipient_id(key_id) == key_id
    for wrong in ("", key_id.upper(), key_id[:-1], "ed25519" + key_id[6:]):
        with pytest.raises(FormatError):
            parse_recipient_id(wrong)
