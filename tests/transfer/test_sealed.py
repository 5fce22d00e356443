"""Sealed artifacts: from one node to the ones they are for, and past all others."""

import io

import attrs
import pytest

from kvport.manifest.digests import blob_digest
from kvport.manifest.errors import (
    ContainerError,
    DecryptionError,
    DigestMismatchError,
    KvportError,
    RecipientError,
    SignatureError,
)
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.signed import SealedArtifact
from kvport.manifest.trust import TrustList
from kvport.manifest.ustar import blob_name
from kvport.manifest.verified import VerifiedManifest
from kvport.snapshot.errors import ArtifactGoneError
from kvport.snapshot.transfer.archive import inspect_file, verify_file
from kvport.snapshot.transfer.exporter import reopen_export
from tests.manifest.builder import pack
from tests.transfer.test_refusals import contents_of, refuse
from tests.transfer.world import CUTS, NOW, TOKENS, WINDOWED


def sealed(origin, *homes, **issue):
    recipients = tuple(home.recipient.public for home in homes)
    return origin.open_export(recipients=recipients, **issue)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("step", [1 << 20, 1_001])
def test_what_is_sealed_for_a_node_is_admitted_there(pair, compress, step):
    a, b = pair
    opened = sealed(a, b, compress=compress)
    data = b"".join(opened.stream())
    assert len(data) == opened.size
    result = b.take(data, step=step)
    assert (result.restored_tokens, result.artifact_id) == (
        len(TOKENS),
        opened.artifact_id,
    )
    assert b.contents(b.match().nodes) == a.contents(a.match().nodes)
    (record,) = b.ledger.artifacts()
    assert b.ledger.papers(record).manifest() == opened.manifest
    assert b.ledger.namespace(record) == b.ns


def test_it_is_admitted_again_without_change(pair):
    a, b = pair
    data = b"".join(sealed(a, b).stream())
    b.take(data)
    before = b.state()
    assert b.take(data).admitted_segments == 0
    assert b.state() == before


def test_others_are_refused_and_keep_nothing(home, pair):
    a, b = pair
    data, other = b"".join(sealed(a, b).stream()), home("other")
    other.trusted.append(a.key)
    assert isinstance(refuse(other, data), RecipientError)


def test_an_unsealed_export_has_the_state_that_a_sealed_one_has(pair):
    a, b = pair
    plain, closed = a.open_export().manifest, sealed(a, b).manifest
    assert attrs.evolve(closed, terms=plain.terms) == plain


def messages(data):
    return {name: content for name, content in contents_of(data) if "/" in name}


def test_unchanged_blobs_are_the_same_messages_from_export_to_export(pair):
    a, b = pair
    one, two = (b"".join(sealed(a, b).stream()) for _ in range(2))
    assert one != two
    assert messages(one) == messages(two) != {}
    documents = [dict(contents_of(data))["private.json"] for data in (one, two)]
    assert documents[0] != documents[1]


def test_a_longer_export_has_the_messages_of_a_shorter_one(home):
    a, b = home("a", layout=WINDOWED), home("b", layout=WINDOWED)
    a.store(kinds={}, windows=CUTS)
    recipients = (b.recipient.public,)
    short = a.export(TOKENS[:9], recipients=recipients)
    longer = a.export(TOKENS, recipients=recipients)
    shared = messages(short).keys() & messages(longer).keys()
    assert len(shared) >= len(messages(short)) // 2
    assert all(messages(short)[name] == messages(longer)[name] for name in shared)


def test_another_home_or_codec_has_other_messages(home, pair):
    a, b = pair
    plain = messages(b"".join(sealed(a, b).stream()))
    compressed = messages(b"".join(sealed(a, b, compress=True).stream()))
    other = home("other")
    other.store()
    others = messages(b"".join(sealed(other, b).stream()))
    assert not plain.keys() & others.keys()
    sizes = {name: len(content) for name, content in plain.items()}
    for name, content in compressed.items():
        assert sizes.get(name, len(content)) == len(content)


def test_no_plain_bytes_are_in_the_file(pair):
    a, b = pair
    data = b"".join(sealed(a, b).stream())
    manifest = a.open_export().manifest
    for segment in manifest.segments:
        assert segment.key.hex().encode() not in data
        for blob in segment.blobs:
            assert blob.digest.hex().encode() not in data
    assert b"safetensors" not in data
    assert b'"dtype"' not in data


def test_without_a_key_every_byte_is_checked_from_outside(pair):
    a, b = pair
    data = b"".join(sealed(a, b).stream())
    outside = verify_file(io.BytesIO(data), trust=b.trust(), now=NOW)
    assert isinstance(outside, SealedArtifact)
    assert outside.size == len(data)
    inside = verify_file(
        io.BytesIO(data), trust=b.trust(), now=NOW, recipient=b.recipient
    )
    assert isinstance(inside, VerifiedManifest)
    assert inside.artifact_id == outside.artifact_id
    assert inspect_file(io.BytesIO(data)).artifact_id == outside.artifact_id
    for recipient in (b.recipient, RecipientKey.generate(), None):
        for at in range(600, len(data), 997):
            wrong = bytearray(data)
            wrong[at] ^= 1
            with pytest.raises(KvportError):
                verify_file(
                    io.BytesIO(wrong), trust=b.trust(), now=NOW, recipient=recipient
                )


def changed(data, change):
    """The file with its messages in another order or number, or of other bytes."""
    entries = contents_of(data)
    head = [entry for entry in entries if "/" not in entry[0]]
    blobs = [entry for entry in entries if "/" in entry[0]]
    return pack([*head, *change(blobs)])


def damaged(blobs):
    (name, content), *rest = blobs
    return [(name, content[:-1] + bytes([content[-1] ^ 1])), *rest]


def renamed(blobs):
    (name, _), (_, other), *rest = blobs
    return [(name, other), (blob_name(blob_digest(b"")), other), *rest]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda blobs: blobs[1:], ContainerError),
        (lambda blobs: blobs[::-1], ContainerError),
        (lambda blobs: [blobs[0], *blobs], ContainerError),
        (renamed, DecryptionError),
        (damaged, DecryptionError),
        (lambda blobs: [(blobs[0][0], blobs[0][1][:-1]), *blobs[1:]], ContainerError),
    ],
)
def test_messages_that_were_changed_on_the_way(pair, change, error):
    a, b = pair
    data = changed(b"".join(sealed(a, b).stream()), change)
    assert isinstance(refuse(b, data), error)


@pytest.mark.parametrize(
    ("name", "error"),
    [("private.json", DigestMismatchError), ("tokens", DigestMismatchError)],
)
def test_documents_that_were_changed_on_the_way(pair, name, error):
    a, b = pair
    entries = contents_of(b"".join(sealed(a, b).stream()))
    data = pack(
        [
            (n, content[:-1] + bytes([content[-1] ^ 1]) if n == name else content)
            for n, content in entries
        ]
    )
    assert isinstance(refuse(b, data), error)


def test_an_outside_that_was_signed_for_others_does_not_fit(pair, home):
    a, b = pair
    other = home("other")
    other.trusted.append(a.key)
    ours = dict(contents_of(b"".join(sealed(a, b).stream())))
    theirs = contents_of(b"".join(sealed(a, other).stream()))
    moved = pack(
        [(n, ours[n] if n == "private.json" else content) for n, content in theirs]
    )
    with pytest.raises(KvportError):
        b.take(moved)
    with pytest.raises(KvportError):
        other.take(moved)


def test_a_kept_sealed_export_is_the_same_bytes_again(pair):
    a, b = pair
    opened = sealed(a, b)
    opened.keep(a.ledger, NOW)
    data = b"".join(opened.stream())
    again = reopen_export(a.cache, a.ledger, opened.artifact_id, **a.reopening())
    assert b"".join(again.stream()) == data


def test_a_kept_sealed_export_is_gone_with_its_secret(pair):
    a, b = pair
    opened = sealed(a, b)
    opened.keep(a.ledger, NOW)
    opened.close()
    arguments = a.reopening() | {"sealing_secret": bytes(32)}
    with pytest.raises(ArtifactGoneError):
        reopen_export(a.cache, a.ledger, opened.artifact_id, **arguments)


def test_nobody_trusts_a_sealed_file_more_than_a_plain_one(pair):
    a, b = pair
    data = b"".join(sealed(a, b).stream())
    b.trusted = [b.key]
    with pytest.raises(KvportError) as caught:
        b.take(data)
    assert caught.value.code == "untrusted_key"
    with pytest.raises(KvportError):
        verify_file(io.BytesIO(data), trust=TrustList(), now=NOW)
    assert not issubclass(caught.type, SignatureError)


def test_a_node_opens_its_own_if_it_is_a_recipient(home):
    a = home("a")
    a.store()
    assert a.take(b"".join(sealed(a, a).stream())).admitted_segments == 0
