import base64
import json

import attrs
import pytest

from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import (
    Envelope,
    Signature,
    encode_envelope,
    open_envelope,
    pae,
    sign_payload,
)
from kvport.manifest.errors import FormatError, KvportError, LimitExceededError
from kvport.manifest.keys import SigningKey
from kvport.manifest.limits import ENVELOPE_BYTES, PAYLOAD_BYTES
from tests.manifest.builder import DENSE, KEY, OTHER_KEY, ManifestBuilder

PAYLOAD = b'{"a":1}'
KEYS = [SigningKey.from_bytes(bytes([n]) * 32) for n in range(20)]


def test_an_envelope_is_dsse():
    document = json.loads(sign_payload(PAYLOAD, [KEY]))
    assert list(document) == ["payload", "payloadType", "signatures"]
    payload = base64.b64decode(document["payload"])
    [signature] = document["signatures"]
    assert payload == PAYLOAD
    assert document["payloadType"] == PayloadType.MANIFEST
    assert signature["keyid"] == KEY.public.key_id
    message = b"DSSEv1 39 application/vnd.kvport.manifest.v1+json 7 " + PAYLOAD
    KEY.public.verify(base64.b64decode(signature["sig"]), message)


def test_pae_counts_bytes():
    assert pae("\u00e4", b"\x00\n") == b"DSSEv1 2 \xc3\xa4 2 \x00\n"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_is_signed_opens(count):
    data = sign_payload(PAYLOAD, KEYS[:count])
    opened = open_envelope(data)
    assert opened.payload == PAYLOAD
    assert opened.payload_type == PayloadType.MANIFEST
    assert len(opened.signatures) == count
    assert encode_envelope(opened) == data


def test_the_order_of_signers_does_not_matter():
    assert sign_payload(PAYLOAD, KEYS[:3]) == sign_payload(PAYLOAD, KEYS[2::-1])


def test_no_signature_is_refused():
    with pytest.raises(FormatError):
        sign_payload(PAYLOAD, [])
    with pytest.raises(FormatError):
        open_envelope(encode_envelope(Envelope(PAYLOAD, PayloadType.MANIFEST, ())))


@pytest.mark.parametrize("count", [9, 20])
def test_more_than_eight_signatures_are_refused(count):
    with pytest.raises(LimitExceededError):
        sign_payload(PAYLOAD, KEYS[:count])
    signatures = sorted(
        (Signature(key.public.key_id, bytes(64)) for key in KEYS[:count]),
        key=lambda signature: signature.key_id,
    )
    data = encode_envelope(Envelope(PAYLOAD, PayloadType.MANIFEST, tuple(signatures)))
    with pytest.raises(LimitExceededError):
        open_envelope(data)


def test_two_signatures_by_one_key_are_refused():
    with pytest.raises(FormatError):
        sign_payload(PAYLOAD, [KEY, KEY])
    opened = open_envelope(sign_payload(PAYLOAD, [KEY]))
    twice = attrs.evolve(opened, signatures=opened.signatures * 2)
    with pytest.raises(FormatError):
        open_envelope(encode_envelope(twice))


def test_unsorted_signatures_are_refused():
    opened = open_envelope(sign_payload(PAYLOAD, [KEY, OTHER_KEY]))
    unsorted = attrs.evolve(opened, signatures=opened.signatures[::-1])
    with pytest.raises(FormatError):
        open_envelope(encode_envelope(unsorted))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"{", b" {"),
        (b":", b": "),
        (b'"payload"', b'"p\\u0061yload"'),
        (b'"payload"', b'"Payload"'),
        (b'"payloadType"', b'"payloadtype"'),
        (b'"payloadType"', b'"extra":1,"payloadType"'),
        (b'"sig":', b'"cert":"","sig":'),
        (b'"keyid":"ed25519:', b'"keyid":"ED25519:'),
        (b'"keyid":"ed25519:', b'"keyid":"'),
        (b"]}", b"]} "),
        (b"]}", b"]}\n"),
        (b"]}", b"],}"),
        (b"]}", b",]}"),
        (b'=="}', b'="}'),
        (b'=="}', b'"}'),
        (b'=="}', b'==="}'),
        (b"eyJhIjoxfQ==", b"eyJhIjoxfQ"),
        (b"eyJhIjoxfQ==", b"eyJhIjoxfQ="),
        (b"eyJhIjoxfQ==", b"eyJhIjoxfQ==="),
        (b"eyJhIjoxfQ==", b"eyJhIjoxfR=="),
        (b"eyJhIjoxfQ==", b"eyJh IjoxfQ=="),
        (b"eyJhIjoxfQ==", b"eyJh\nIjoxfQ=="),
        (b"eyJhIjoxfQ==", b"eyJh\\nIjoxfQ=="),
        (b"eyJhIjoxfQ==", b"eyJh=IjoxfQ=="),
        (b"eyJhIjoxfQ==", b"=eyJhIjoxfQ=="),
        (b"eyJhIjoxfQ==", b"eyJhIjoxfQ==eyJhIjoxfQ=="),
        (b"eyJhIjoxfQ==", b"eyJhIj-_fQ=="),
        (b"application/vnd", b"application\\/vnd"),
        (b"application/vnd", b"application/\xc3\xa4"),
        (b"application/vnd", b"a" * 128),
    ],
)
def test_another_spelling_is_refused(good, bad):
    data = sign_payload(PAYLOAD, [KEY])
    assert good in data
    with pytest.raises(FormatError):
        open_envelope(data.replace(good, bad, 1))


def test_other_bits_that_decode_to_the_same_signature_are_refused():
    data = sign_payload(PAYLOAD, [KEY])
    at = data.index(b'=="}') - 1
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    for last in alphabet:
        other = data[:at] + bytes([last]) + data[at + 1 :]
        if other == data:
            continue
        try:
            opened = open_envelope(other)
        except FormatError:
            continue
        assert opened.signatures != open_envelope(data).signatures


def test_the_members_have_one_order():
    data = sign_payload(PAYLOAD, [KEY])
    document = json.loads(data)
    reverse = dict(reversed(document.items()))
    assert json.dumps(document, separators=(",", ":")).encode() == data
    with pytest.raises(FormatError):
        open_envelope(json.dumps(reverse, separators=(",", ":")).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b'{"payload":"', b"null", bytes(600)])
def test_what_is_not_an_envelope_is_refused(data):
    with pytest.raises(FormatError):
        open_envelope(data)


def test_truncation_anywhere_is_refused():
    data = sign_payload(PAYLOAD, [KEY])
    for length in range(len(data)):
        with pytest.raises(FormatError):
            open_envelope(data[:length])


def test_an_envelope_is_limited_in_size():
    with pytest.raises(LimitExceededError):
        open_envelope(bytes(ENVELOPE_BYTES + 1))
    with pytest.raises(LimitExceededError):
        sign_payload(bytes(PAYLOAD_BYTES), [KEY])


def test_the_largest_envelope_keeps_the_payload_within_its_limit():
    overhead = len(sign_payload(b"", [KEY]))
    largest = (ENVELOPE_BYTES - overhead) // 4 * 3
    assert largest < PAYLOAD_BYTES
    assert len(open_envelope(sign_payload(bytes(largest), [KEY])).payload) == largest


def test_every_single_bit_flip_of_an_envelope_is_refused():
    builder = ManifestBuilder(layout=DENSE, tokens=(1, 2), cuts=(), points={})
    data = bytearray(builder.signed())
    builder.verified(bytes(data))
    trust, local = builder.trust(), builder.local()
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(KvportError):
            builder.verified(bytes(data), trust=trust, local=local)
        data[bit // 8] ^= 1 << bit % 8
