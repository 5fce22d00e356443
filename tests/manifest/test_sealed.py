import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import blob_digest
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    BindingMismatchError,
    DecryptionError,
    DigestMismatchError,
    ExpiredError,
    FormatError,
    KvportError,
    LimitExceededError,
    RecipientError,
    RevokedKeyError,
    ScopeError,
    SignatureError,
    UnsupportedVersionError,
)
from kvport.manifest.sealed import BLOB_CONTEXT, PrivatePart, SealedManifest, Wrap
from kvport.manifest.sealing import open_message
from kvport.manifest.trust import Revocation
from kvport.manifest.ustar import container_size
from kvport.manifest.verified import BlobEntry, SealedEntry
from tests.manifest.builder import (
    HYBRID,
    KEY,
    NOW,
    OTHER_KEY,
    TOKENIZER,
    ManifestBuilder,
)
from tests.manifest.sealed_builder import READER, SealedBuilder, other_reader


@pytest.fixture
def builder():
    return SealedBuilder()


def test_a_recipient_finds_the_plain_artifact_inside(builder):
    sealed = builder.verified()
    private, tokens, *messages = builder.messages()
    verified = sealed.open(private, READER).fit(builder.plain.local())
    plain = builder.plain.verified()
    assert verified.manifest == plain.manifest
    assert verified.artifact_id == sealed.artifact_id != plain.artifact_id
    assert verified.size == sealed.size == len(builder.container())
    nodes = verified.nodes(verified.token_bytes(tokens))
    assert nodes == plain.nodes(builder.plain.token_bytes)

    blobs = [e for e in verified.entries() if isinstance(e, BlobEntry)]
    contents = builder.plain.blobs()
    for entry, message in zip(blobs, messages, strict=True):
        assert entry.size == len(message)
        assert entry.seal.digest == blob_digest(message)
        opened = open_message(entry.seal.key, BLOB_CONTEXT, message)
        assert opened == contents[entry.digest]


def test_without_a_key_every_byte_can_still_be_checked(builder):
    entries = builder.verified().entries()
    assert [entry.name for entry in entries[:3]] == [
        "envelope.json",
        "private.json",
        "tokens",
    ]
    for entry, message in zip(entries[1:], builder.messages(), strict=True):
        assert isinstance(entry, SealedEntry)
        assert (entry.digest, entry.size) == (blob_digest(message), len(message))
    assert container_size(entries) == builder.verified().size


def test_the_outside_says_nothing_about_the_text(builder):
    outside = builder.manifest().encode()
    manifest = builder.plain.manifest()
    digests = {blob_digest(blob) for blob in builder.plain.blobs().values()}
    hidden = {
        manifest.prefix.key,
        manifest.prefix.digest,
        *digests,
        *(segment.key for segment in manifest.segments),
    }
    assert not any(digest.hex().encode() in outside for digest in hidden)


def test_several_recipients_open_it_and_nobody_else():
    second = other_reader()
    builder = SealedBuilder(recipients=(READER.public, second.public))
    private, *_ = builder.messages()
    for key in (READER, second):
        opened = builder.verified().open(private, key)
        assert opened.manifest == builder.plain.manifest()
    with pytest.raises(RecipientError):
        builder.verified().open(private, other_reader())


def evolved(builder, **other):
    return builder.signed(builder.manifest(**other).encode())


def test_a_wrap_for_another_is_of_no_use_under_our_name(builder):
    [wrap] = builder.manifest().recipients
    theirs = other_reader().public
    moved = Wrap(READER.public.key_id, theirs.wrap(b"c" * 32, bytes.fromhex("00" * 16)))
    sealed = builder.verified(evolved(builder, recipients=(moved,)))
    with pytest.raises(DecryptionError):
        sealed.open(builder.messages()[0], READER)
    assert wrap.recipient == READER.public.key_id


def test_a_wrap_of_another_artifact_is_of_no_use(builder):
    nonce = bytes(16)
    wrap = Wrap(READER.public.key_id, READER.public.wrap(b"c" * 32, nonce))
    sealed = builder.verified(evolved(builder, recipients=(wrap,)))
    with pytest.raises(DecryptionError):
        sealed.open(builder.messages()[0], READER)


def test_another_private_part_is_refused(builder):
    private, *_ = builder.messages()
    for wrong in (b"", private[:-1], private + b"\0", bytes(len(private))):
        with pytest.raises(DigestMismatchError):
            builder.verified().open(wrong, READER)


def private_of(builder, part):
    """The artifact with this private part, whatever it says."""
    envelope = builder.signed(builder.manifest(part).encode())
    return builder.verified(envelope), builder.messages(part)[0]


def test_terms_inside_are_those_outside(builder):
    part, manifest = builder.part(), builder.plain.manifest()
    for change in ({"scope": "other"}, {"nonce": "0" * 32}, {"audience": ()}):
        terms = attrs.evolve(manifest.terms, **change)
        if terms == manifest.terms:
            continue
        inner = attrs.evolve(part, manifest=attrs.evolve(manifest, terms=terms))
        sealed, private = private_of(builder, inner)
        with pytest.raises(ArithmeticMismatchError):
            sealed.open(private, READER)


def test_there_is_one_message_and_one_key_per_blob(builder):
    part, manifest = builder.part(), builder.manifest()
    private, *_ = builder.messages()
    fewer = builder.verified(evolved(builder, blobs=manifest.blobs[:-1]))
    with pytest.raises(ArithmeticMismatchError):
        fewer.open(private, READER).fit(None)
    short = attrs.evolve(part, blob_keys=part.blob_keys[:-1])
    sealed, private = private_of(builder, short)
    with pytest.raises(ArithmeticMismatchError):
        sealed.open(private, READER).fit(None)


def test_messages_have_the_sizes_of_their_contents(builder):
    manifest = builder.manifest()
    private, *_ = builder.messages()
    longer = attrs.evolve(manifest.blobs[0], size=manifest.blobs[0].size + 1)
    tokens = attrs.evolve(manifest.tokens, size=manifest.tokens.size - 1)
    for change in ({"blobs": (longer, *manifest.blobs[1:])}, {"tokens": tokens}):
        sealed = builder.verified(evolved(builder, **change))
        with pytest.raises(ArithmeticMismatchError):
            sealed.open(private, READER).fit(None)


def test_exchanged_messages_do_not_open():
    builder = SealedBuilder(plain=ManifestBuilder(layout=HYBRID))
    manifest = builder.manifest()
    blobs = manifest.blobs
    pair = next(
        (i, j)
        for i in range(len(blobs))
        for j in range(i)
        if blobs[i].size == blobs[j].size
    )
    swapped = list(blobs)
    swapped[pair[0]], swapped[pair[1]] = blobs[pair[1]], blobs[pair[0]]
    sealed = builder.verified(evolved(builder, blobs=tuple(swapped)))
    private, _, *messages = builder.messages()
    verified = sealed.open(private, READER).fit(builder.plain.local())
    by_digest = {blob_digest(message): message for message in messages}
    entries = [e for e in verified.entries() if isinstance(e, BlobEntry)]
    for at in pair:
        seal = entries[at].seal
        with pytest.raises(DecryptionError):
            open_message(seal.key, BLOB_CONTEXT, by_digest[seal.digest])


def test_tokens_that_were_exchanged_do_not_open(builder):
    private, tokens, *_ = builder.messages()
    verified = builder.verified().open(private, READER).fit(None)
    with pytest.raises(DecryptionError):
        verified.token_bytes(tokens[:-1] + bytes([tokens[-1] ^ 1]))


def test_what_is_inside_must_fit_too(builder):
    private, *_ = builder.messages()
    opened = builder.verified().open(private, READER)
    with pytest.raises(BindingMismatchError):
        opened.fit(builder.plain.local(tokenizer=TOKENIZER[::-1]))


def test_terms_are_policed_before_anything_is_opened(builder):
    late = builder.plain.expires
    with pytest.raises(ExpiredError):
        builder.verified(now=late)
    with pytest.raises(ScopeError):
        builder.verified(trust=builder.plain.trust(scopes=frozenset({"other"})))
    audience = SealedBuilder(
        plain=ManifestBuilder(audience=(builder.plain.key.public.key_id,))
    )
    with pytest.raises(ScopeError):
        audience.verified()
    with pytest.raises(LimitExceededError):
        builder.verified(max_bytes=builder.verified().size - 1)


def test_the_signature_is_over_recipients_and_messages(builder):
    envelope = builder.signed()
    other = builder.signed(builder.manifest(blobs=()).encode())
    head, tail = envelope.split(b'","payloadType"')
    assert tail
    moved = other.split(b'","payloadType"')[0] + b'","payloadType"' + tail
    assert head != moved.split(b'","payloadType"')[0]
    with pytest.raises(SignatureError):
        builder.verified(moved)


def test_a_sealed_payload_is_no_plain_one_and_the_other_way_round(builder):
    plain = builder.plain
    with pytest.raises(UnsupportedVersionError):
        builder.verified(builder.signed(plain.manifest().encode()))
    with pytest.raises(UnsupportedVersionError):
        plain.verified(plain.signed(builder.manifest().encode()))
    with pytest.raises(UnsupportedVersionError):
        plain.verified(builder.signed())


def payloads(builder):
    """Payloads that are out of form, by what is wrong with them."""
    good = strict_loads(builder.manifest().encode())
    [wrap] = good["recipients"]
    blob = good["blobs"][0]
    key_id = wrap["key_id"]
    yield "no recipients", {**good, "recipients": []}
    yield "one twice", {**good, "recipients": [wrap, wrap]}
    yield "a short wrap", {**good, "recipients": [{**wrap, "wrap": "00" * 79}]}
    upper = {**wrap, "wrap": wrap["wrap"].upper()}
    yield "an upper-case wrap", {**good, "recipients": [upper]}
    other = {**wrap, "key_id": "ed25519" + key_id[6:]}
    yield "a key that signs", {**good, "recipients": [other]}
    yield "a blob twice", {**good, "blobs": [blob, blob]}
    yield "a blob without size", {**good, "blobs": [{"digest": blob["digest"]}]}
    yield "a negative size", {**good, "private": {**good["private"], "size": -1}}
    yield "an unknown field", {**good, "identity": {}}
    missing = dict(good)
    del missing["tokens"]
    yield "a missing field", missing


@pytest.mark.parametrize("what", [what for what, _ in payloads(SealedBuilder())])
def test_payloads_have_one_form(builder, what):
    payload = dict(payloads(builder))[what]
    with pytest.raises(FormatError):
        builder.verified(builder.signed(canonical_dumps(payload)))


def parts(builder):
    good = strict_loads(builder.part().encode(), depth=9)
    keys = good["keys"]
    yield "no keys", {"manifest": good["manifest"]}
    yield "an unknown field", {**good, "more": 1}
    yield "a short key", {**good, "keys": {**keys, "tokens": "00" * 31}}
    yield "a key that is no text", {**good, "keys": {**keys, "blobs": [1]}}
    yield "an upper-case key", {**good, "keys": {**keys, "blobs": ["AB" * 32]}}
    yield "no manifest", {**good, "manifest": {}}


@pytest.mark.parametrize("what", [what for what, _ in parts(SealedBuilder())])
def test_private_parts_have_one_form(builder, what):
    value = dict(parts(builder))[what]
    with pytest.raises(FormatError):
        PrivatePart.decode(canonical_dumps(value, depth=9))


def test_both_parts_are_read_as_they_were_written(builder):
    sealed, part = builder.manifest(), builder.part()
    assert SealedManifest.from_json(strict_loads(sealed.encode())) == sealed
    assert PrivatePart.decode(part.encode()) == part


def test_no_key_shows_in_what_is_printed(builder):
    private, *_ = builder.messages()
    verified = builder.verified().open(private, READER).fit(None)
    shown = repr((builder.part(), verified, verified.entries(), READER))
    for key in (b"t" * 32, *builder.part().blob_keys, READER.to_bytes()):
        assert key.hex() not in shown
        assert repr(key)[2:-1] not in shown


def test_flipped_bits_of_a_sealed_envelope_are_refused(builder):
    envelope = builder.signed()
    for bit in range(0, len(envelope) * 8, 7):
        wrong = bytearray(envelope)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(KvportError):
            builder.verified(bytes(wrong))


def test_what_is_sealed_must_not_come_from_a_revoked_key(builder):
    """The origins are inside: only who opens it can tell."""
    plain = builder.plain.manifest()
    both = frozenset({KEY.public.key_id, OTHER_KEY.public.key_id})

    def tainted(part):
        return attrs.evolve(
            part, provenance=attrs.evolve(part.provenance, origins=both)
        )

    manifest = attrs.evolve(
        plain,
        segments=tuple(map(tainted, plain.segments)),
        points=tuple(map(tainted, plain.points)),
    )
    part = attrs.evolve(builder.part(), manifest=manifest)
    private = builder.messages(part)[0]
    data = builder.signed(builder.manifest(part).encode())
    assert builder.verified(data).open(private, READER).manifest == manifest
    revoked = Revocation(key_id=OTHER_KEY.public.key_id, at=NOW)
    outside = builder.verified(data, trust=builder.plain.trust().revoke([revoked]))
    with pytest.raises(RevokedKeyError):
        outside.open(private, READER)
    signer = Revocation(key_id=KEY.public.key_id, at=NOW)
    with pytest.raises(RevokedKeyError):
        builder.verified(trust=builder.plain.trust().revoke([signer]))
