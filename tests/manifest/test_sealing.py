import os

import pytest
from cryptography.cobblestone import Cobblestone256Decryptor, Cobblestone256Encryptor
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.errors import DecryptionError
from kvport.manifest.sealing import (
    CHUNK_BYTES,
    Opener,
    Sealer,
    open_message,
    seal_message,
    sealed_size,
)

KEY, SALT, CONTEXT = bytes(range(32)), b"salt" * 6, b"a test"
EDGES = [
    0,
    1,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    2 * CHUNK_BYTES,
    5 * CHUNK_BYTES + 7,
]
HEADER, WIRE = 56, CHUNK_BYTES + 16


@pytest.mark.parametrize("size", EDGES)
def test_the_library_reads_what_we_write_and_we_what_it_writes(size):
    data = os.urandom(size)
    message = seal_message(KEY, CONTEXT, SALT, data)
    assert len(message) == sealed_size(size)
    library = Cobblestone256Decryptor(KEY, CONTEXT)
    assert library.update(message) + library.finalize() == data
    encryptor = Cobblestone256Encryptor(KEY, CONTEXT)
    other = encryptor.update(data) + encryptor.finalize()
    assert open_message(KEY, CONTEXT, other) == data


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=8), st.integers(1, 99_999))
def test_how_it_is_cut_on_the_way_makes_no_difference(cuts, step):
    data = os.urandom(sum(cuts))
    sealer, message, at = Sealer(KEY, CONTEXT, SALT), b"", 0
    for size in cuts:
        message += sealer.update(memoryview(data)[at : at + size])
        at += size
    message += sealer.finish()
    assert message == seal_message(KEY, CONTEXT, SALT, data)
    opener, plain = Opener(KEY, CONTEXT), b""
    for start in range(0, len(message), step):
        plain += opener.update(message[start : start + step])
    assert plain + opener.finish() == data


def test_equal_blobs_under_equal_keys_and_salts_are_equal_messages():
    data = os.urandom(40_000)
    assert seal_message(KEY, CONTEXT, SALT, data) == seal_message(
        KEY, CONTEXT, SALT, data
    )
    other = seal_message(KEY, CONTEXT, b"tlas" * 6, data)
    assert other[HEADER:] != seal_message(KEY, CONTEXT, SALT, data)[HEADER:]


def messages():
    data = os.urandom(3 * CHUNK_BYTES + 100)
    good = seal_message(KEY, CONTEXT, SALT, data)
    head, body = good[:HEADER], good[HEADER:]
    chunks = [body[at : at + WIRE] for at in range(0, len(body), WIRE)]
    swapped = [chunks[1], chunks[0], *chunks[2:]]
    yield "cut in a chunk", good[:-1]
    yield "cut at a chunk's end", head + b"".join(chunks[:-1])
    yield "nothing but a header", head
    yield "cut in the header", good[:40]
    yield "empty", b""
    yield "extended", good + b"\0"
    yield "a chunk appended", good + chunks[0]
    yield "chunks exchanged", head + b"".join(swapped)
    yield "a chunk twice", head + b"".join([chunks[0], *chunks])
    yield "a chunk left out", head + b"".join([*chunks[:1], *chunks[2:]])
    other = seal_message(KEY, CONTEXT, b"tlas" * 6, data)
    yield "a header of another message", other[:HEADER] + body
    yield "a chunk of another message", good[:-WIRE] + other[-WIRE:]


@pytest.mark.parametrize("message", [*dict(messages()).values()], ids=dict(messages()))
def test_a_message_that_was_changed_is_refused(message):
    with pytest.raises(DecryptionError):
        open_message(KEY, CONTEXT, message)


def test_another_key_or_context_is_refused():
    message = seal_message(KEY, CONTEXT, SALT, b"secret")
    for key, context in ((bytes(32), CONTEXT), (KEY, b""), (KEY, CONTEXT + b"\0")):
        with pytest.raises(DecryptionError):
            open_message(key, context, message)


def test_every_flipped_bit_is_refused():
    good = seal_message(KEY, CONTEXT, SALT, b"twenty bytes of text")
    for bit in range(len(good) * 8):
        wrong = bytearray(good)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecryptionError):
            open_message(KEY, CONTEXT, bytes(wrong))


def test_nothing_of_a_wrong_chunk_is_given_out():
    good = seal_message(KEY, CONTEXT, SALT, bytes(2 * CHUNK_BYTES))
    wrong = bytearray(good)
    wrong[HEADER + WIRE] ^= 1
    opener = Opener(KEY, CONTEXT)
    assert len(opener.update(wrong[: HEADER + WIRE])) == CHUNK_BYTES
    with pytest.raises(DecryptionError):
        opener.update(wrong[HEADER + WIRE :])


@pytest.mark.parametrize(("key", "salt"), [(KEY[1:], SALT), (KEY, SALT + b"!")])
def test_keys_and_salts_have_one_length(key, salt):
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(key, CONTEXT, salt)
