"""The signed envelope: DSSE v1 in exactly one byte form.

    {"payload":"<base64>","payloadType":"<type>","signatures":[
        {"keyid":"ed25519:<64 hex>","sig":"<base64>"}, ...]}      (no white space)

* Standard, padded base64 that encodes back to itself; 64-byte signatures.
* 1 to 8 signatures, one per key, sorted by key id.
* What is signed is `PAE(type, payload)`, so a payload cannot pass for another type.

The envelope is read by position, never by a JSON parser: bytes that nobody has vouched
for are searched and compared, and nothing but the payload is built from them. The
caller must verify the signatures before it looks into the payload (verify.py).
"""

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from kvport.manifest.domains import PayloadType
from kvport.manifest.errors import FormatError, LimitExceededError
from kvport.manifest.identity import KeyId
from kvport.manifest.keys import SigningKey
from kvport.manifest.limits import ENVELOPE_BYTES, SIGNATURES

_BEFORE_PAYLOAD: Final = b'{"payload":"'
_BEFORE_TYPE: Final = b'","payloadType":"'
_BEFORE_SIGNATURES: Final = b'","signatures":['
_AFTER_SIGNATURES: Final = b"]}"

_SIGNATURE: Final = (
    rb'\{"keyid":"(ed25519:[0-9a-f]{64})","sig":"([A-Za-z0-9+/]{86}==)"\}'
)
_ONE_SIGNATURE: Final = re.compile(_SIGNATURE)
_TAIL: Final = re.compile(
    rb'([!#-\[\]-~]{1,127})","signatures":\[(%b(?:,%b)*)\]\}' % (_SIGNATURE, _SIGNATURE)
)
_SIGNATURE_BYTES: Final = 181  # of one in the envelope
_TAIL_BYTES: Final = 256 + SIGNATURES * (_SIGNATURE_BYTES + 1)


@attrs.frozen
class Signature:
    """A signature and the id of the key that is said to have made it.

    Attributes:
        key_id: a hint for finding the key, proven by the verification only.
        value: 64 bytes.
    """

    key_id: KeyId
    value: bytes


@attrs.frozen
class Envelope:
    """A well-formed envelope; nothing in it is verified yet."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    @property
    def message(self) -> bytes:
        """The bytes that the signatures are over."""
        return pae(self.payload_type, self.payload)


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding; lengths are in bytes."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign_payload(
    payload: bytes,
    signers: Sequence[SigningKey],
    payload_type: PayloadType = PayloadType.MANIFEST,
) -> bytes:
    """Sign a payload and put it in its envelope.

    Raises:
        FormatError: no signer, or one twice.
        LimitExceededError: too many signers, or the payload is too large.
    """
    message = pae(payload_type, payload)
    signatures = sorted(
        (Signature(key.public.key_id, key.sign(message)) for key in signers),
        key=lambda signature: signature.key_id,
    )
    _check_signers([signature.key_id for signature in signatures])
    data = encode_envelope(Envelope(payload, payload_type, tuple(signatures)))
    if len(data) > ENVELOPE_BYTES:
        raise LimitExceededError("the payload is too large for an envelope")
    return data


def encode_envelope(envelope: Envelope) -> bytes:
    """The byte form, of whatever the envelope holds."""
    return b"".join(
        (
            _BEFORE_PAYLOAD,
            base64.b64encode(envelope.payload),
            _BEFORE_TYPE,
            envelope.payload_type.encode("utf-8"),
            _BEFORE_SIGNATURES,
            b",".join(_encode_signatures(envelope.signatures)),
            _AFTER_SIGNATURES,
        )
    )


def open_envelope(data: bytes) -> Envelope:
    """Take the envelope apart; checks size and form, not signatures.

    Raises:
        LimitExceededError: larger than `ENVELOPE_BYTES`, or too many signatures. A
            payload within that is within `PAYLOAD_BYTES`: base64 adds a third.
        FormatError: any other bytes than the one form.
    """
    if len(data) > ENVELOPE_BYTES:
        raise LimitExceededError("the envelope is too large")
    start = len(_BEFORE_PAYLOAD)
    end = data.find(_BEFORE_TYPE, start)
    if not data.startswith(_BEFORE_PAYLOAD) or end < 0:
        raise FormatError("not an envelope")
    tail = data[end + len(_BEFORE_TYPE) :][: _TAIL_BYTES + 1]
    if len(tail) > _TAIL_BYTES:
        raise LimitExceededError("the envelope has too many signatures")
    if not (found := _TAIL.fullmatch(tail)):
        raise FormatError("the envelope's type or signatures are not in form")
    signatures = tuple(
        Signature(KeyId(key_id.decode("ascii")), _decode(value))
        for key_id, value in _ONE_SIGNATURE.findall(found[2])
    )
    _check_signers([signature.key_id for signature in signatures])
    payload = _decode(memoryview(data)[start:end])
    return Envelope(payload, found[1].decode("ascii"), signatures)


def _encode_signatures(signatures: Iterable[Signature]) -> Iterable[bytes]:
    for signature in signatures:
        key_id = signature.key_id.encode("ascii")
        value = base64.b64encode(signature.value)
        yield b'{"keyid":"%b","sig":"%b"}' % (key_id, value)


def _check_signers(key_ids: Sequence[KeyId]) -> None:
    if len(key_ids) > SIGNATURES:
        raise LimitExceededError("the envelope has too many signatures")
    if not key_ids or list(key_ids) != sorted(set(key_ids)):
        raise FormatError("signatures must be sorted by key id, one per key")


def _decode(text: bytes | memoryview) -> bytes:
    try:
        value = binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise FormatError("not standard base64") from error
    if base64.b64encode(value) != text:  # bits that decode to nothing, for one
        raise FormatError("base64 is not in its one form")
    return value
