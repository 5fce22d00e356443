"""One test per rule of verify.py and arithmetic.py, named after it."""

import copy
from datetime import timedelta

import attrs
import pytest

from kvport.manifest.codec import Codec
from kvport.manifest.digests import BlobDigest, artifact_id, blob_digest, format_digest
from kvport.manifest.envelope import Signature, encode_envelope, open_envelope, pae
from kvport.manifest.errors import (
    ArithmeticMismatchError,
    BindingMismatchError,
    ExpiredError,
    FormatError,
    LimitExceededError,
    RevokedKeyError,
    ScopeError,
    SignatureError,
    TokenMismatchError,
    UnsupportedVersionError,
    UntrustedKeyError,
)
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import (
    BlobClass,
    CacheKind,
    CacheLayout,
    LeafSpec,
    StateLayout,
)
from kvport.manifest.limits import CLOCK_SKEW_SECONDS, ENVELOPE_BYTES, MIB
from kvport.manifest.nodes import ROOT_NODE, node_id
from kvport.manifest.parts import Blob
from kvport.manifest.tokens import encode_tokens
from kvport.manifest.trust import Revocation, TrustEntry, TrustList
from kvport.manifest.ustar import Entry
from kvport.manifest.verified import BlobEntry, VerifiedManifest
from tests.manifest.builder import (
    ALL,
    DENSE,
    HYBRID,
    KEY,
    NOW,
    OTHER_KEY,
    WINDOWED,
    ManifestBuilder,
    identity_of,
)

BUILDER = ManifestBuilder()
REVOKED = Revocation(key_id=KEY.public.key_id, at=NOW)
BOTH = TrustList.of(
    TrustEntry(public_key=key.public, name="") for key in (KEY, OTHER_KEY)
)
SECOND = timedelta(seconds=1)


def edited(change, builder=BUILDER):
    """The builder's payload after a change, signed again."""
    payload = copy.deepcopy(builder.payload())
    change(payload)
    return builder.signed(payload)


# What is true


@pytest.mark.parametrize("layout", [DENSE, WINDOWED, HYBRID, ALL])
def test_a_true_artifact_verifies(layout):
    builder = ManifestBuilder(layout=layout)
    verified = builder.verified()
    assert verified.manifest == builder.manifest()
    assert verified.payload == builder.manifest().encode()
    assert verified.envelope == builder.signed()
    assert verified.artifact_id == artifact_id(verified.payload)
    assert verified.size == len(builder.container())


def test_a_verified_manifest_comes_from_verify_only():
    verified = BUILDER.verified()
    fields = {
        "manifest": verified.manifest,
        "payload": verified.payload,
        "envelope": verified.envelope,
        "entries": verified.entries(),
    }
    with pytest.raises(TypeError):
        VerifiedManifest(object(), **fields)
    with pytest.raises(TypeError):
        attrs.evolve(verified, manifest=verified.manifest)


def test_entries_are_in_the_order_of_the_container():
    manifest = BUILDER.manifest()
    envelope, tokens, *blobs = BUILDER.verified().entries()
    assert envelope == Entry("envelope.json", len(BUILDER.signed()))
    assert tokens == Entry("tokens", 40)
    boundaries = [blob for point in manifest.points for blob in point.blobs]
    rows = [blob for segment in manifest.segments for blob in segment.blobs]
    expected = [*boundaries, *rows]
    assert [entry.digest for entry in blobs] == [blob.digest for blob in expected]
    assert [entry.size for entry in blobs] == [blob.size for blob in expected]
    contents = BUILDER.blobs()
    for entry in blobs:
        assert isinstance(entry, BlobEntry)
        assert entry.name == f"blobs/blake3/{entry.digest.hex()}"
        entry.layout.check_header(contents[entry.digest][: len(entry.layout.header)])


def test_a_blob_that_occurs_twice_is_one_entry():
    def repeat(payload):
        # Segments [6, 8) and [8, 10) have as many rows.
        payload["segments"][3]["blobs"] = payload["segments"][2]["blobs"]

    before = BUILDER.verified().entries()
    after = BUILDER.verified(edited(repeat)).entries()
    assert after[1:] == before[1:-2]


def test_nodes_are_the_path():
    nodes = BUILDER.verified().nodes(BUILDER.token_bytes)
    manifest = BUILDER.manifest()
    assert [(node.start, node.end) for node in nodes] == BUILDER.ranges
    assert [node.key for node in nodes] == [part.key for part in manifest.segments]
    assert nodes[0].parent == ROOT_NODE
    assert [node.parent for node in nodes[1:]] == [node.id for node in nodes[:-1]]
    assert [node.kinds for node in nodes] == [
        (),
        (PointKind.FORK,),
        (),
        (PointKind.PROMPT, PointKind.STRIDE),
    ]
    for node, segment in zip(nodes, manifest.segments, strict=True):
        digests = {name: blob.digest for name, blob in node.blobs.items()}
        assert node.id == node_id(node.parent, node.key, digests)
        assert (BlobClass.STATE in node.blobs) == bool(node.kinds)
        assert node.provenance == segment.provenance


# 1 and 2, besides test_envelope.py


def test_an_envelope_above_the_limit_is_refused_first():
    with pytest.raises(LimitExceededError):
        BUILDER.verified(bytes(ENVELOPE_BYTES + 1))


def test_bytes_that_are_no_envelope_are_refused():
    with pytest.raises(FormatError):
        BUILDER.verified(BUILDER.manifest().encode())


# 3


def test_another_payload_type_is_refused_although_it_is_signed():
    kind = "application/vnd.kvport.manifest.v2+json"
    opened = open_envelope(BUILDER.signed())
    signature = Signature(KEY.public.key_id, KEY.sign(pae(kind, opened.payload)))
    other = attrs.evolve(opened, payload_type=kind, signatures=(signature,))
    with pytest.raises(UnsupportedVersionError):
        BUILDER.verified(encode_envelope(other))


def test_a_signature_over_another_payload_type_does_not_verify():
    opened = open_envelope(BUILDER.signed())
    signature = Signature(KEY.public.key_id, KEY.sign(pae("text/x", opened.payload)))
    other = attrs.evolve(opened, signatures=(signature,))
    with pytest.raises(SignatureError):
        BUILDER.verified(encode_envelope(other))


# 4


def test_an_empty_trust_list_refuses_everything():
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(trust=TrustList())


def test_an_unknown_signer_is_refused():
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(BUILDER.signed(signers=[OTHER_KEY]))


def test_a_revoked_signer_is_refused_whether_it_is_listed_or_not():
    for trust in (BUILDER.trust(), TrustList()):
        with pytest.raises(RevokedKeyError) as refused:
            BUILDER.verified(trust=trust.revoke([REVOKED]))
        assert refused.value.code == "revoked_key"


def test_state_that_came_from_a_revoked_key_is_refused():
    payload = BUILDER.payload()
    payload["origins"] = sorted([*payload["origins"], OTHER_KEY.public.key_id])
    for part in (*payload["segments"], *payload["points"]):
        part["origins"] = [0, 1]
    data = BUILDER.signed(payload)
    assert BUILDER.verified(data)
    other = attrs.evolve(REVOKED, key_id=OTHER_KEY.public.key_id)
    with pytest.raises(RevokedKeyError):
        BUILDER.verified(data, trust=BUILDER.trust().revoke([other]))


def test_an_unknown_signer_beside_a_known_one_is_refused():
    data = BUILDER.signed(signers=[KEY, OTHER_KEY])
    assert BUILDER.verified(data, trust=BOTH)
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(data)


def test_a_key_id_is_a_hint_only():
    opened = open_envelope(BUILDER.signed(signers=[OTHER_KEY]))
    hinted = Signature(KEY.public.key_id, opened.signatures[0].value)
    other = attrs.evolve(opened, signatures=(hinted,))
    with pytest.raises(SignatureError):
        BUILDER.verified(encode_envelope(other))


def test_every_signature_must_verify():
    opened = open_envelope(BUILDER.signed(signers=[KEY, OTHER_KEY]))
    for index in range(2):
        signatures = list(opened.signatures)
        signatures[index] = attrs.evolve(signatures[index], value=bytes(64))
        other = attrs.evolve(opened, signatures=tuple(signatures))
        with pytest.raises(SignatureError):
            BUILDER.verified(encode_envelope(other), trust=BOTH)


def test_a_signer_past_its_trust_is_refused():
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(trust=BUILDER.trust(not_after=NOW))


def test_a_signer_without_the_role_export_is_refused():
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(trust=BUILDER.trust(roles=frozenset()))


def test_nothing_is_parsed_before_the_signature_holds():
    data = BUILDER.signed(b"{not json", signers=[OTHER_KEY])
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(data)


# 5


def test_a_signed_payload_that_is_not_canonical_is_refused():
    payload = BUILDER.manifest().encode()
    with pytest.raises(FormatError):
        BUILDER.verified(BUILDER.signed(payload + b"\n"))


def test_a_signed_payload_with_another_field_is_refused():
    with pytest.raises(FormatError):
        BUILDER.verified(edited(lambda payload: payload.update(session={})))


# 6


@pytest.mark.parametrize("fields", [{"format_version": 2}, {"artifact_kind": "delta"}])
def test_another_version_is_refused(fields):
    with pytest.raises(UnsupportedVersionError):
        BUILDER.verified(edited(lambda payload: payload.update(fields)))


# 7


def test_an_issuer_who_did_not_sign_is_refused():
    data = BUILDER.signed(signers=[OTHER_KEY])
    with pytest.raises(SignatureError):
        BUILDER.verified(data, trust=BOTH)


# 8


def test_an_artifact_from_the_future_is_refused():
    skew = timedelta(seconds=CLOCK_SKEW_SECONDS)
    assert BUILDER.verified(now=NOW - skew)
    with pytest.raises(ExpiredError):
        BUILDER.verified(now=NOW - skew - SECOND)


def test_an_expired_artifact_is_refused():
    assert BUILDER.verified(now=BUILDER.expires - SECOND)
    with pytest.raises(ExpiredError):
        BUILDER.verified(now=BUILDER.expires)


def test_an_artifact_for_others_is_refused():
    own = OTHER_KEY.public.key_id
    builder = attrs.evolve(BUILDER, audience=(own,))
    assert builder.verified(own_key=own)
    with pytest.raises(ScopeError):
        builder.verified(own_key=KEY.public.key_id)
    with pytest.raises(ScopeError):
        builder.verified(own_key=None)


def test_a_scope_that_a_signer_is_not_trusted_with_is_refused():
    builder = attrs.evolve(BUILDER, scope="team")
    assert builder.verified(trust=builder.trust(scopes=frozenset({"team"})))
    with pytest.raises(ScopeError):
        builder.verified(trust=builder.trust(scopes=frozenset({"default"})))


# 9


def test_another_model_is_refused():
    other = BUILDER.local(identity=identity_of(ALL, "other weights"))
    with pytest.raises(BindingMismatchError) as caught:
        BUILDER.verified(local=other)
    assert caught.value.fields == ("model_files",)


def test_another_engine_version_is_refused():
    other = attrs.evolve(BUILDER.identity, mlx_lm="0.33.0")
    with pytest.raises(BindingMismatchError) as caught:
        BUILDER.verified(local=BUILDER.local(identity=other))
    assert caught.value.fields == ("mlx_lm",)


def test_another_tokenizer_is_refused():
    with pytest.raises(BindingMismatchError) as caught:
        BUILDER.verified(local=BUILDER.local(tokenizer=BlobDigest(bytes(32))))
    assert caught.value.fields == ("tokenizer",)


def test_another_block_size_is_refused():
    with pytest.raises(BindingMismatchError) as caught:
        BUILDER.verified(local=BUILDER.local(block_size=8))
    assert caught.value.fields == ("block_size",)


def test_all_mismatches_are_named_at_once():
    other = BUILDER.local(
        identity=identity_of(DENSE), tokenizer=BlobDigest(bytes(32)), block_size=8
    )
    with pytest.raises(BindingMismatchError) as caught:
        BUILDER.verified(local=other)
    assert caught.value.fields == ("layout", "tokenizer", "block_size")


def test_a_model_that_a_signer_is_not_trusted_with_is_refused():
    trust = BUILDER.trust(models=frozenset({"other"}))
    with pytest.raises(UntrustedKeyError):
        BUILDER.verified(trust=trust)
    assert BUILDER.verified(trust=trust, local=BUILDER.local(model="other"))


def test_offline_nothing_but_the_binding_is_left_out():
    assert BUILDER.verified(local=None)
    with pytest.raises(ExpiredError):
        BUILDER.verified(local=None, now=BUILDER.expires)
    with pytest.raises(ArithmeticMismatchError):
        BUILDER.verified(edited(lambda p: p["segments"].pop()), local=None)


# 10


def segment(index, **fields):
    return lambda payload: payload["segments"][index].update(fields)


def point(index, **fields):
    return lambda payload: payload["points"][index].update(fields)


def blob(part, index, **fields):
    return lambda payload: payload[part][index]["blobs"][0].update(fields)


def merge_across_a_block_end(payload):
    payload["segments"][2:] = [{**payload["segments"][3], "start": 6}]


def swap_segments(payload):
    segments = payload["segments"]
    segments[0], segments[1] = segments[1], segments[0]


def swap_classes(payload):
    payload["segments"][0]["blobs"].reverse()


def state_in_a_segment(payload):
    payload["segments"][0]["blobs"].append(payload["points"][0]["blobs"][0])


def rows_at_a_point(payload):
    payload["points"][0]["blobs"] = payload["segments"][0]["blobs"][:1]


def one_digest_for_two_classes(payload):
    kv, window = payload["segments"][0]["blobs"]
    window["digest"] = kv["digest"]


def one_digest_for_two_ranges(payload):
    first, second = payload["segments"][:2]
    second["blobs"][0]["digest"] = first["blobs"][0]["digest"]


def two_encodings(payload):
    # Segments [6, 8) and [8, 10) have as many rows.
    third, fourth = payload["segments"][2:4]
    fourth["blobs"] = copy.deepcopy(third["blobs"])
    fourth["blobs"][0] |= {"codec": "shuffle-zstd", "encoded_size": 20}


def encoded(size, codec="shuffle-zstd"):
    return blob("segments", 0, codec=codec, encoded_size=size)


SIZE = BUILDER.manifest().segments[0].blobs[0].size

CONTIGUOUS = "not contiguous"
NO_END = "do not end where"
ROWS = "segment's blobs"
STATES = "point's blobs"
ENCODED = "encoded size"
NO_POINT = "does not end in a restore point"
ARITHMETIC = {
    "segments_start_at_zero": (CONTIGUOUS, lambda p: p["segments"].pop(0)),
    "segments_end_at_the_prefix": (NO_END, lambda p: p["segments"].pop()),
    "segments_have_no_hole": (CONTIGUOUS, lambda p: p["segments"].pop(2)),
    "segments_do_not_overlap": (CONTIGUOUS, segment(1, start=3)),
    "segments_are_not_repeated": (
        CONTIGUOUS,
        lambda p: p["segments"].insert(1, p["segments"][0]),
    ),
    "segments_are_in_order": (CONTIGUOUS, swap_segments),
    "segments_are_not_empty": (CONTIGUOUS, segment(0, end=0)),
    "segments_do_not_run_backwards": (CONTIGUOUS, segment(1, end=3)),
    "segments_do_not_cross_block_ends": ("crosses", merge_across_a_block_end),
    "there_are_segments": (
        NO_END,
        lambda p: p.update(segments=[], points=[], numerics=[], origins=[]),
    ),
    "the_last_key_is_that_of_the_prefix": (
        "last segment's key",
        lambda p: p["prefix"].update(key="0" * 64),
    ),
    "a_segment_has_every_class": (ROWS, lambda p: p["segments"][0]["blobs"].pop()),
    "a_segment_has_blobs": (ROWS, segment(0, blobs=[])),
    "a_segment_has_its_classes_in_order": (ROWS, swap_classes),
    "a_segment_has_no_state": (ROWS, state_in_a_segment),
    "a_point_has_a_state": (STATES, point(0, blobs=[])),
    "a_point_has_no_rows": (STATES, rows_at_a_point),
    "a_point_is_a_segment_end": ("not the end of a", point(0, position=7)),
    "a_point_is_not_at_zero": ("ascend", point(0, position=0)),
    "a_point_is_within_the_prefix": ("not the end of a", point(1, position=12)),
    "points_ascend": ("ascend", lambda p: p["points"].reverse()),
    "points_are_not_repeated": (
        "ascend",
        lambda p: p["points"].insert(0, p["points"][0]),
    ),
    "a_point_agrees_with_its_segment": ("disagrees", point(0, lineage="cold")),
    "there_is_a_restore_point": (NO_POINT, lambda p: p.update(points=[])),
    "the_prefix_ends_in_a_restore_point": (NO_POINT, lambda p: p["points"].pop()),
    "a_blob_is_not_larger": ("blob's size", blob("segments", 0, size=SIZE + 1)),
    "a_blob_is_not_smaller": ("blob's size", blob("segments", 0, size=SIZE - 1)),
    "a_boundary_is_not_empty": ("blob's size", blob("points", 0, size=0)),
    "a_digest_is_of_one_class": ("two layouts", one_digest_for_two_classes),
    "a_digest_is_of_one_range": ("two layouts", one_digest_for_two_ranges),
    "a_digest_is_of_one_encoding": ("two encodings", two_encodings),
    "a_plain_blob_is_not_encoded_smaller": (ENCODED, encoded(SIZE - 1, "none")),
    "a_plain_blob_is_not_encoded_larger": (ENCODED, encoded(SIZE + 1, "none")),
    "an_encoded_blob_is_smaller": (ENCODED, encoded(SIZE)),
    "an_encoded_blob_is_not_empty": (ENCODED, encoded(0)),
    "the_token_entry_has_four_bytes_an_id": (
        "token entry",
        lambda p: p["prefix"].update(size=36),
    ),
    "the_prefix_has_tokens": (
        "token entry",
        lambda p: p["prefix"].update(tokens=0, size=0),
    ),
    "the_prefix_is_as_long_as_its_segments": (
        NO_END,
        lambda p: p["prefix"].update(tokens=9, size=36),
    ),
}


@pytest.mark.parametrize("rule", ARITHMETIC)
def test_rule_of_arithmetic(rule):
    message, change = ARITHMETIC[rule]
    with pytest.raises(ArithmeticMismatchError, match=message):
        BUILDER.verified(edited(change))


def test_a_point_of_a_layout_without_whole_layers_has_no_blob():
    builder = ManifestBuilder(layout=WINDOWED)
    state = BUILDER.payload()["points"][0]["blobs"]
    with pytest.raises(ArithmeticMismatchError):
        builder.verified(edited(point(0, blobs=state), builder))


# Twenty tokens; windows of three rows before 10 and 20: no others are there.
SPARSE = ManifestBuilder(
    tokens=tuple(range(20)),
    points={10: (PointKind.FORK,), 20: (PointKind.PROMPT,)},
)


def test_window_rows_that_no_point_needs_are_not_there():
    verified = SPARSE.verified()
    held = [
        (part.start, part.end)
        for part in verified.manifest.segments
        if any(blob.blob_class is BlobClass.WINDOW for blob in part.blobs)
    ]
    assert held == [(6, 8), (8, 10), (16, 20)]
    assert verified.size == len(SPARSE.container())
    nodes = verified.nodes(SPARSE.token_bytes)
    assert [BlobClass.WINDOW in n.blobs for n in nodes] == [
        (n.start, n.end) in held for n in nodes
    ]


@pytest.mark.parametrize("index", [2, 3, 6])
def test_window_rows_that_a_point_needs_must_be_there(index):
    assert len(SPARSE.ranges) == 7

    def change(payload):
        assert payload["segments"][index]["blobs"].pop()["class"] == "window"

    with pytest.raises(ArithmeticMismatchError, match=ROWS):
        SPARSE.verified(edited(change, SPARSE))


@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_window_rows_that_no_point_needs_are_refused(index):
    start, end = SPARSE.ranges[index]
    content = SPARSE.content(BlobClass.WINDOW, start, end)
    found = Blob(BlobClass.WINDOW, blob_digest(content), len(content))

    def change(payload):
        payload["segments"][index]["blobs"].append(found.to_json())

    with pytest.raises(ArithmeticMismatchError, match=ROWS):
        SPARSE.verified(edited(change, SPARSE))


def test_window_rows_are_not_there_for_points_that_are_not_listed():
    # The fork's windows are useless without it.
    with pytest.raises(ArithmeticMismatchError, match=ROWS):
        SPARSE.verified(edited(lambda p: p["points"].pop(0), SPARSE))


def test_a_windowed_model_needs_a_point():
    with pytest.raises(ArithmeticMismatchError):
        ManifestBuilder(layout=WINDOWED, points={}).verified()


def test_a_model_of_full_layers_needs_no_point():
    assert ManifestBuilder(layout=DENSE, points={}).verified()


def test_an_artifact_above_the_callers_limit_is_refused():
    size = BUILDER.verified().size
    assert BUILDER.verified(max_bytes=size)
    with pytest.raises(LimitExceededError):
        BUILDER.verified(max_bytes=size - 1)


class HugeBlobs(ManifestBuilder):
    """Blobs of almost 1 GiB that are said to take 8 MiB in the container."""

    def _blob(self, blob_class, start, end):
        digest = blob_digest(f"{blob_class} {start}".encode())
        size = self._layout(blob_class, start, end).size
        return Blob(blob_class, digest, size, Codec.SHUFFLE_ZSTD, 8 * MIB)


def test_blobs_that_are_decoded_to_more_than_an_artifact_may_hold_are_refused():
    leaf = LeafSpec("k", "F32", (-1, (1 << 28) - 100))
    huge = StateLayout((CacheLayout("0", CacheKind.KV, None, (leaf,)),))
    for count, fits in ((64, True), (65, False)):
        builder = HugeBlobs(
            layout=huge, tokens=tuple(range(count)), block_size=1, cuts=(), points={}
        )
        envelope = builder.signed()
        if fits:
            assert builder.verified(envelope).size < 1 << 30
        else:
            with pytest.raises(LimitExceededError):
                builder.verified(envelope)


# 11


@pytest.mark.parametrize(
    "tokens",
    [
        b"",
        BUILDER.token_bytes[:-4],
        BUILDER.token_bytes[:-1],
        BUILDER.token_bytes + bytes(4),
        encode_tokens([101, *BUILDER.tokens[1:]]),
        encode_tokens([*BUILDER.tokens[:-1], 0]),
    ],
)
def test_other_token_ids_are_refused(tokens):
    with pytest.raises(TokenMismatchError):
        BUILDER.verified().nodes(tokens)


@pytest.mark.parametrize("index", range(4))
def test_a_signed_key_that_is_not_that_of_the_ids_is_refused(index):
    def change(payload):
        payload["segments"][index]["key"] = "0" * 64
        payload["prefix"]["key"] = payload["segments"][-1]["key"]

    verified = BUILDER.verified(edited(change))
    with pytest.raises(TokenMismatchError):
        verified.nodes(BUILDER.token_bytes)


def test_signed_ids_that_are_not_those_of_the_keys_are_refused():
    other = ManifestBuilder(tokens=tuple(range(10)))

    def change(payload):
        digest = other.manifest().prefix.digest
        payload["prefix"]["digest"] = format_digest(digest)

    verified = BUILDER.verified(edited(change))
    with pytest.raises(TokenMismatchError):
        verified.nodes(other.token_bytes)


@pytest.mark.parametrize("length", [36, 44])
def test_a_signed_digest_of_fewer_or_more_ids_is_refused(length):
    tokens = (BUILDER.token_bytes + bytes(4))[:length]

    def change(payload):
        payload["prefix"]["digest"] = format_digest(blob_digest(tokens))

    verified = BUILDER.verified(edited(change))
    with pytest.raises(TokenMismatchError):
        verified.nodes(tokens)


def test_a_signed_digest_that_is_not_that_of_the_ids_is_refused():
    def change(payload):
        payload["prefix"]["digest"] = format_digest(bytes(32))

    verified = BUILDER.verified(edited(change))
    with pytest.raises(TokenMismatchError):
        verified.nodes(BUILDER.token_bytes)


def test_the_order_of_failures_is_that_of_the_steps():
    """Everything is wrong; each step, put right, uncovers the next."""
    builder = ManifestBuilder(
        audience=(OTHER_KEY.public.key_id,), expires=NOW, scope="team"
    )

    def change(payload):
        payload["issuer"]["key_id"] = OTHER_KEY.public.key_id
        payload["segments"].pop()

    wrong = edited(change, builder)
    nowhere = {
        "trust": TrustList(),
        "own_key": None,
        "local": builder.local(block_size=8),
        "max_bytes": 0,
    }
    trust = builder.trust(scopes=frozenset())
    with pytest.raises(UntrustedKeyError):
        builder.verified(wrong, **nowhere)
    with pytest.raises(SignatureError):
        builder.verified(wrong, **{**nowhere, "trust": trust})
    wrong = edited(lambda payload: payload["segments"].pop(), builder)
    at = {**nowhere, "trust": trust}
    with pytest.raises(ExpiredError):
        builder.verified(wrong, **at)
    at["now"] = NOW - SECOND
    with pytest.raises(ScopeError):
        builder.verified(wrong, **at)
    at["own_key"] = OTHER_KEY.public.key_id
    with pytest.raises(ScopeError):
        builder.verified(wrong, **at)
    at["trust"] = builder.trust()
    with pytest.raises(BindingMismatchError):
        builder.verified(wrong, **at)
    at["local"] = builder.local()
    with pytest.raises(ArithmeticMismatchError):
        builder.verified(wrong, **at)
    with pytest.raises(LimitExceededError):
        builder.verified(builder.signed(), **at)
