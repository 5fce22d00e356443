"""What import refuses: each with its code, and nothing here has changed afterwards."""

import base64
import random
from collections.abc import Iterator

import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import blob_digest, format_digest
from kvport.manifest.envelope import open_envelope, sign_payload
from kvport.manifest.errors import (
    BindingMismatchError,
    ContainerError,
    DigestMismatchError,
    ExpiredError,
    KvportError,
    LimitExceededError,
    ScopeError,
    SignatureError,
    TensorHeaderError,
    TokenMismatchError,
    UntrustedKeyError,
)
from kvport.manifest.identity import PointKind
from kvport.manifest.limits import GIB, MIB
from kvport.manifest.tokens import encode_tokens
from kvport.manifest.ustar import TRAILER, container_size, header, padding
from kvport.snapshot.errors import CapacityError, TooLargeError
from kvport.snapshot.transfer.importer import LocalModel
from kvport.snapshot.transfer.issue import LIFETIME
from kvport.snapshot.transfer.ledger import Papers
from tests.transfer.world import (
    DENSE,
    HYBRID,
    NOW,
    TOKENS,
    Home,
    identity_of,
)


@attrs.frozen
class Part:
    """An entry of a container, by the offsets of its parts."""

    name: str
    header: int
    start: int
    end: int
    next: int


@pytest.fixture
def receiver(pair) -> Iterator[Home]:
    """b, which holds state of its own; a good import still works at the end."""
    a, b = pair
    b.store([7, 8, 9], [3], kinds={})
    data = a.export()
    yield b
    assert b.take(data).restored_tokens == 11


@pytest.fixture
def data(pair) -> bytes:
    return pair[0].export()


def split(data: bytes) -> list[Part]:
    parts, at = [], 0
    while data[at]:
        name = data[at : at + 100].rstrip(b"\0").decode()
        size = int(data[at + 124 : at + 135], 8)
        end = at + 512 + size
        parts.append(Part(name, at, at + 512, end, end + -size % 512))
        at = parts[-1].next
    return parts


def pack(contents: list[tuple[str, bytes]]) -> bytes:
    return (
        b"".join(header(n, len(d)) + d + padding(len(d)) for n, d in contents) + TRAILER
    )


def contents_of(data: bytes) -> list[tuple[str, bytes]]:
    return [(part.name, data[part.start : part.end]) for part in split(data)]


def name_of(blob: bytes) -> str:
    return f"blobs/blake3/{blob_digest(blob).hex()}"


def refuse(home: Home, data: bytes, **options) -> KvportError:
    """Import what must be refused; cache and ledger must be as before."""
    before = home.state()
    with pytest.raises(KvportError) as caught:
        home.take(data, **options)
    assert home.state() == before
    return caught.value


def resigned(home: Home, data: bytes, **fields) -> bytes:
    """The container with edited fields of its manifest, signed again."""
    contents = contents_of(data)
    value = Papers(contents[0][1]).manifest().to_json() | fields
    envelope = sign_payload(canonical_dumps(value), [home.key])
    return pack([("envelope.json", envelope), *contents[1:]])


# Damage on the way.


def test_one_flipped_bit_anywhere(pair, receiver):
    tokens = [50, 51, 52, 53, 54]
    pair[0].store(tokens, (4, 5), kinds={5: {PointKind.PROMPT}})
    data = pair[0].export(tokens)
    parts = split(data)
    assert len(parts) == 7
    rng = random.Random(3612)
    places = rng.sample(range(len(data) * 8), 1000)
    # One in each header, content, padding and the trailer at least.
    for part in parts:
        places += [8 * (part.header + 130), 8 * part.start + 1, 8 * part.end - 3]
        if part.next > part.end:
            places.append(8 * part.end)
    places.append(8 * len(data) - 1)
    before = receiver.state()
    for place in places:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(KvportError) as caught:
            receiver.take(bytes(flipped))
        assert caught.value.code in codes_of(parts, place // 8), place
    assert receiver.state() == before


def codes_of(parts: list[Part], offset: int) -> set[str]:
    """What a flipped bit may be refused with, by where it is."""
    for part in parts:
        if part.start <= offset < part.end:
            if part.name == "envelope.json":
                return {"format", "signature", "untrusted_key", "unsupported_version"}
            if part.name == "tokens":
                return {"token_mismatch"}
            # A blob's header is compared as a whole; its body is hashed.
            return {"tensor_header", "digest_mismatch"}
    first = parts[0]
    if first.header + 124 <= offset < first.header + 136:
        # The envelope's own size: more or fewer bytes are taken for it.
        return {"container", "limit_exceeded", "format"}
    return {"container"}


def test_a_blobs_header_that_is_not_the_derived_one(receiver, data):
    part = split(data)[2]
    flipped = bytearray(data)
    flipped[part.start + 9] ^= 1
    assert isinstance(refuse(receiver, bytes(flipped)), TensorHeaderError)


def test_a_signed_blob_with_another_header(pair, receiver, data):
    contents = contents_of(data)
    name, blob = contents[4]
    changed = blob.replace(b'"F16"', b'"I16"')
    assert changed != blob
    contents[4] = (name_of(changed), changed)
    value = Papers(contents[0][1]).manifest().to_json()
    for segment in value["segments"]:
        for found in segment["blobs"]:
            if found["digest"].endswith(name[-64:]):
                found["digest"] = format_digest(blob_digest(changed))
    edited = resigned(pair[0], pack(contents), segments=value["segments"])
    assert isinstance(refuse(receiver, edited), TensorHeaderError)


def test_a_blobs_body_that_was_not_signed(receiver, data):
    part = split(data)[-1]
    flipped = bytearray(data)
    flipped[part.end - 1] ^= 1
    assert isinstance(refuse(receiver, bytes(flipped)), DigestMismatchError)


def test_truncation_at_any_length(receiver, data):
    edges = {edge for p in split(data) for edge in (p.header, p.start, p.end, p.next)}
    lengths = {e + d for e in edges for d in (-1, 0, 1)} | {len(data) - 1, 0, 512}
    before = receiver.state()
    for length in sorted(n for n in lengths if 0 <= n < len(data)):
        with pytest.raises(ContainerError):
            receiver.take(data[:length])
    assert receiver.state() == before


@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(512), bytes(10240)])
def test_appended_bytes(receiver, data, tail):
    assert isinstance(refuse(receiver, data + tail), ContainerError)


def test_swapped_blobs(receiver, data):
    contents = contents_of(data)
    sizes = [len(content) for _, content in contents]
    assert sizes[4] == sizes[5]  # two kv blobs of full blocks
    (a, first), (b, second) = contents[4], contents[5]
    contents[4], contents[5] = (a, second), (b, first)
    assert isinstance(refuse(receiver, pack(contents)), DigestMismatchError)


def test_entries_in_another_order(receiver, data):
    contents = contents_of(data)
    contents[4], contents[6] = contents[6], contents[4]
    assert isinstance(refuse(receiver, pack(contents)), ContainerError)


def test_a_missing_entry(receiver, data):
    contents = contents_of(data)
    assert isinstance(refuse(receiver, pack(contents[:-1])), ContainerError)


def test_edited_token_ids(receiver, data):
    contents = contents_of(data)
    contents[1] = ("tokens", encode_tokens([*TOKENS[:-1], 5]))
    assert isinstance(refuse(receiver, pack(contents)), TokenMismatchError)


def test_edited_token_ids_that_were_signed(pair, receiver, data):
    tokens = encode_tokens([*TOKENS[:-1], 5])
    contents = contents_of(data)
    contents[1] = ("tokens", tokens)
    prefix = Papers(contents[0][1]).manifest().to_json()["prefix"]
    prefix["digest"] = format_digest(blob_digest(tokens))
    edited = resigned(pair[0], pack(contents), prefix=prefix)
    assert isinstance(refuse(receiver, edited), TokenMismatchError)


# Names, links, sizes.


def _with_header(data: bytes, part: Part, **fields: tuple[int, bytes]) -> bytes:
    """Edit a header's fields, with a right checksum."""
    block = bytearray(data[part.header : part.start])
    for at, value in fields.values():
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[: part.header] + bytes(block) + data[part.start :]


@pytest.mark.parametrize("name", [b"/etc/passwd\0", b"../../x\0", b"blobs\\..\\x\0"])
@pytest.mark.parametrize("entry", [0, 1, 3])
def test_a_name_that_is_a_path(receiver, data, name, entry):
    edited = _with_header(data, split(data)[entry], name=(0, name.ljust(100, b"\0")))
    error = refuse(receiver, edited)
    assert isinstance(error, ContainerError)
    assert "path" in error.message


@pytest.mark.parametrize("kind", [b"1", b"2", b"5", b"x", b"g", b"L"])
def test_an_entry_that_is_a_link_or_special(receiver, data, kind):
    edited = _with_header(data, split(data)[2], kind=(156, kind))
    error = refuse(receiver, edited)
    assert isinstance(error, ContainerError)
    assert "link" in error.message


@pytest.mark.parametrize("entry", [1, 2])
def test_a_header_that_declares_3_gib(receiver, data, entry):
    size = b"%011o\0" % (3 * GIB)
    edited = _with_header(data, split(data)[entry], size=(124, size))
    assert isinstance(refuse(receiver, edited), ContainerError)


def test_an_envelope_that_declares_3_gib(receiver, data):
    size = b"%011o\0" % (3 * GIB)
    edited = _with_header(data, split(data)[0], size=(124, size))
    assert isinstance(refuse(receiver, edited), LimitExceededError)


def test_a_signed_blob_of_3_gib(pair, receiver, data):
    segments = Papers(contents_of(data)[0][1]).manifest().to_json()["segments"]
    segments[0]["blobs"][0]["size"] = 3 * GIB
    edited = resigned(pair[0], data, segments=segments)
    assert isinstance(refuse(receiver, edited), LimitExceededError)


def test_an_artifact_above_the_servers_limit(receiver, data):
    error = refuse(receiver, data, max_bytes=len(data) - 1)
    assert isinstance(error, TooLargeError)


def test_an_artifact_above_the_cap(home):
    a, b = home("a", layout=DENSE, block_size=8192), home("b", cap=4 * MIB)
    small = b.cache.namespace(a.ns.identity, "default", 8192)
    b.models = [LocalModel("tiny", b.models[0].tokenizer_digest, small)]
    b.trusted.append(a.key)
    b.store()
    tokens = list(range(150_000))
    a.store(tokens, [*range(8192, 150_000, 8192), 150_000], kinds={})
    assert isinstance(refuse(b, a.export(tokens)), CapacityError)


# Another model, signer, time or scope.


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"model_files": format_digest(b"\1" * 32)}, ("model_files",)),
        ({"quant": {"bits": 8}}, ("quant",)),
        ({"mlx_lm": "0.32.3"}, ("mlx_lm",)),
        ({"layout": HYBRID}, ("layout",)),
        ({"tokenizer": format_digest(b"\1" * 32)}, ("tokenizer",)),
        ({"block_size": 8}, ("block_size",)),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_state_of_something_else(home, other, fields, others):
    a, b = home("a", **other), home("b")
    b.trusted.append(a.key)
    b.store([7, 8, 9], [3], kinds={})
    a.store()
    # With several models, what differs from the closest is named.
    far = b.cache.namespace(identity_of(DENSE, mlx_lm="1", kv="x"), "default", 512)
    models = [LocalModel("far", format_digest(b"\2" * 32), far)] * others + b.models
    error = refuse(b, a.export(), models=models)
    assert isinstance(error, BindingMismatchError)
    assert error.fields == fields


def test_an_unknown_signer(receiver, home):
    c = home("c")
    c.store()
    assert isinstance(refuse(receiver, c.export()), UntrustedKeyError)


def test_a_signer_that_is_trusted_no_longer(pair, receiver, data):
    trusted, receiver.trusted = receiver.trusted, [receiver.key]
    assert isinstance(refuse(receiver, data), UntrustedKeyError)
    receiver.trusted = trusted


def test_another_issuer_than_the_signer(pair, receiver, data):
    issuer = {"key_id": receiver.key_id, "name": "b"}
    edited = resigned(pair[0], data, issuer=issuer)
    assert isinstance(refuse(receiver, edited), SignatureError)


def test_a_payload_that_was_edited_after_signing(receiver, data):
    contents = contents_of(data)
    payload = open_envelope(contents[0][1]).payload
    edited = payload.replace(b'"scope":"default"', b'"scope":"defaulu"')
    contents[0] = (
        "envelope.json",
        contents[0][1].replace(base64.b64encode(payload), base64.b64encode(edited)),
    )
    assert isinstance(refuse(receiver, pack(contents)), SignatureError)


def test_an_expired_artifact(receiver, data):
    expires = NOW + LIFETIME
    assert isinstance(refuse(receiver, data, now=lambda: expires), ExpiredError)


def test_an_artifact_from_the_future(receiver, data):
    past = NOW.replace(year=2025)
    assert isinstance(refuse(receiver, data, now=lambda: past), ExpiredError)


def test_an_artifact_for_other_nodes(pair, receiver):
    a = pair[0]
    data = a.export(audience=frozenset({a.key_id}))
    assert isinstance(refuse(receiver, data), ScopeError)
    for_both = a.export(audience=frozenset({a.key_id, receiver.key_id}))
    assert receiver.take(for_both).restored_tokens == 11


def test_the_size_that_was_signed_is_the_size_that_is_sent(pair, data):
    opened = pair[0].open_export()
    assert len(data) == container_size(opened._verified.entries()) == opened.size
    opened.close()
