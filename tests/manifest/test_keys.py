import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.errors import FormatError, SignatureError, WeakKeyError
from kvport.manifest.keys import PublicKey, SigningKey, parse_key_id

# Point arithmetic of edwards25519, written here apart from the code under test.
P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
IDENTITY = (0, 1)


def add(a, b):
    (x1, y1), (x2, y2) = a, b
    t = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + t, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - t, -1, P)
    return x % P, y % P


def multiply(n, point):
    total = IDENTITY
    while n:
        if n & 1:
            total = add(total, point)
        point, n = add(point, point), n >> 1
    return total


def points():
    """Points of the curve with small y, both roots of each."""
    for y in range(2, 40):
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        for root in (x, x * pow(2, (P - 1) // 4, P) % P):
            if root * root % P == square:
                yield from ((root, y), (P - root, y))


SMALL_ORDER = {multiply(n, multiply(L, point)) for point in points() for n in range(8)}


def encodings():
    """Every 32-byte string that stands for a point of small order."""
    for y in {y for _, y in SMALL_ORDER}:
        for written in range(y, 2**255, P):
            for sign in (0, 1):
                yield (written | sign << 255).to_bytes(32, "little")


def test_there_are_eight_points_of_small_order():
    assert len(SMALL_ORDER) == 8
    assert all(multiply(8, point) == IDENTITY for point in SMALL_ORDER)
    assert len(set(encodings())) == 14


@pytest.mark.parametrize("raw", sorted(encodings()), ids=bytes.hex)
def test_a_key_of_small_order_is_weak(raw):
    with pytest.raises(WeakKeyError):
        PublicKey(raw)


def test_the_library_itself_accepts_forgeries_under_a_weak_key():
    identity = (1).to_bytes(32, "little")
    forged = identity + bytes(32)
    Ed25519PublicKey.from_public_bytes(identity).verify(forged, b"anything")


@pytest.mark.parametrize("y", [y for y in range(2, 19) if (0, y) not in SMALL_ORDER])
def test_a_second_encoding_of_a_key_is_refused(y):
    PublicKey(y.to_bytes(32, "little"))
    for sign in (0, 1):
        with pytest.raises(FormatError):
            PublicKey((y + P | sign << 255).to_bytes(32, "little"))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_have_32_bytes(length):
    with pytest.raises(FormatError):
        PublicKey(bytes(length))
    with pytest.raises(FormatError):
        SigningKey.from_bytes(bytes(length))


def test_the_signature_is_that_of_rfc_8032():
    # RFC 8032, section 7.1, test 2.
    seed = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    public = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    signature = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    key = SigningKey.from_bytes(bytes.fromhex(seed))
    assert key.public.raw.hex() == public
    assert key.sign(b"\x72").hex() == signature


def test_the_key_id_is_derived_from_the_key():
    key = SigningKey.generate().public
    digest = blake3(key.raw, derive_key_context="kvport/v1/key-id").hexdigest()
    assert key.key_id == f"ed25519:{digest}"
    assert parse_key_id(key.key_id) == key.key_id


@pytest.mark.parametrize(
    "text",
    ["", "ed25519:", "ed25519:" + "A" * 64, "ed448:" + "a" * 64, "ed25519:" + "a" * 65],
)
def test_key_ids_have_one_form(text):
    with pytest.raises(FormatError):
        parse_key_id(text)


def test_a_key_survives_its_bytes():
    key = SigningKey.generate()
    again = SigningKey.from_bytes(key.to_bytes())
    again.public.verify(key.sign(b"m"), b"m")
    assert again.public == key.public


def test_a_key_does_not_show_its_seed():
    key = SigningKey.generate()
    assert key.to_bytes().hex() not in repr(key)


@given(st.integers(0, 64 * 8 - 1))
def test_every_bit_of_a_signature_counts(bit):
    key = SigningKey.from_bytes(bytes(32))
    signature = bytearray(key.sign(b"message"))
    key.public.verify(bytes(signature), b"message")
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SignatureError):
        key.public.verify(bytes(signature), b"message")


def test_adding_the_group_order_does_not_give_a_second_signature():
    key = SigningKey.from_bytes(bytes(32))
    signature = key.sign(b"message")
    s = int.from_bytes(signature[32:], "little") + L
    with pytest.raises(SignatureError):
        key.public.verify(signature[:32] + s.to_bytes(32, "little"), b"message")


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_of_another_length_is_refused(length):
    with pytest.raises(SignatureError):
        SigningKey.generate().public.verify(bytes(length), b"message")
