import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.errors import FormatError
from kvport.manifest.layout import BlobClass
from kvport.manifest.nodes import ROOT_NODE, node_id
from kvport.manifest.tokens import encode_tokens, prefix_keys

IDENTITY = bytes(range(32))
GOLDEN_KEYS = [
    "5769099e45521b4eac27a70424cb6c30164368de14ab7da81e6d4b51143977f7",
    "212fd592baf89c3d44d1542096209249d97c3b624ac8035b07ea4933711c4be7",
    "2b7dbb19d02e4d580a8bed7857b9dbbdd8fd492b26ca7b57be4562f9391a1b5a",
]
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def kdf(context, data):
    return blake3(data, derive_key_context=context).digest()


def key_by_definition(block, ids, end):
    chain = kdf("kvport/v1/key-root", struct.pack("<I", block) + IDENTITY)
    for at in range(0, end, block):
        part = ids[at : min(at + block, end)]
        packed = struct.pack(f"<I{len(part)}I", len(part), *part)
        chain = kdf("kvport/v1/key", chain + packed)
    return chain


def test_keys_of_a_fixed_sequence():
    # B70. Computed once from the definition; a change breaks every stored prefix.
    keys = prefix_keys(IDENTITY, 4, encode_tokens(range(1, 11)), [3, 4, 10])
    assert [key.hex() for key in keys] == GOLDEN_KEYS


@given(IDS, st.integers(1, 9), st.data())
def test_a_key_is_what_its_definition_says(ids, block, data):
    position = st.integers(0, len(ids))
    ends = sorted(data.draw(st.lists(position, max_size=6)))
    keys = prefix_keys(IDENTITY, block, encode_tokens(ids), ends)
    assert keys == [key_by_definition(block, ids, end) for end in ends]


@given(IDS.filter(len), st.integers(1, 9), st.data())
def test_every_token_counts(ids, block, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    keys = prefix_keys(IDENTITY, block, encode_tokens(ids), range(1, len(ids) + 1))
    others = prefix_keys(IDENTITY, block, encode_tokens(other), range(1, len(ids) + 1))
    differs = [mine != theirs for mine, theirs in zip(keys, others, strict=True)]
    assert differs == [end > at for end in range(1, len(ids) + 1)]


def test_identity_and_block_size_count():
    tokens = encode_tokens(range(8))
    keys = {
        prefix_keys(identity, block, tokens, [end])[0]
        for identity in (IDENTITY, bytes(32))
        for block in (4, 8, 16)
        for end in (0, 8)
    }
    assert len(keys) == 12


@pytest.mark.parametrize("ends", [[5], [4, 3], [-1]])
def test_positions_ascend_within_the_tokens(ends):
    with pytest.raises(ValueError, match="ascend"):
        prefix_keys(IDENTITY, 2, encode_tokens(range(4)), ends)


@given(IDS)
def test_ids_are_little_endian_u32(ids):
    data = encode_tokens(ids)
    assert data == struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.0], ["1"], [None]])
def test_what_is_no_u32_is_no_token_id(ids):
    with pytest.raises(FormatError):
        encode_tokens(ids)


def test_a_node_is_named_as_defined():
    parent, key, kv, state = (bytes([n]) * 32 for n in range(1, 5))
    digests = {BlobClass.STATE: state, BlobClass.KV: kv}
    expected = kdf("kvport/v1/node", parent + key + b"\1" + kv + b"\0\1" + state)
    assert node_id(parent, key, digests) == expected
    assert bytes(32) == ROOT_NODE


def test_a_digest_in_another_class_names_another_node():
    digest = bytes([7]) * 32
    ids = {node_id(ROOT_NODE, digest, {name: digest}) for name in BlobClass}
    assert len(ids | {node_id(ROOT_NODE, digest, {})}) == 4
