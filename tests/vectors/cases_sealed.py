"""Sealed artifacts that are refused."""

from collections.abc import Iterator
from typing import Any

from kvport.manifest.digests import BlobDigest, blob_digest
from kvport.manifest.sealed import BLOB_CONTEXT, TOKENS_CONTEXT, private_context
from kvport.manifest.sealing import seal_message
from kvport.manifest.ustar import blob_name
from tests.manifest.builder import KEY, TOKENIZER, pack
from tests.manifest.sealed_builder import READER, SALT, TOKENS_KEY
from tests.vectors.case import Case
from tests.vectors.large import LARGE, large_messages
from tests.vectors.making import BASE
from tests.vectors.sealed_making import (
    OTHER_READER,
    SEALED,
    inside,
    outside,
    packed,
    recipients,
    resigned,
    sealed_case,
    with_private,
)
from tests.vectors.trust_making import LOST, revoking
from tests.vectors.wrapping import wrap


def cases() -> Iterator[Case]:
    yield from _outside()
    yield from _wraps()
    yield from _inside()
    yield from _messages()


def _flip(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def _outside() -> Iterator[Case]:
    def add(name: str, breaks: str, change: Any, code: str = "format") -> Case:
        return sealed_case(
            f"sealed-{name}", code, breaks, outside(change), recipient=None
        )

    def wraps(edit: Any) -> Any:
        return lambda v: v.update(recipients=edit(v["recipients"]))

    yield add("no-recipient", "there is a recipient", wraps(lambda _: []))
    yield add("recipient-twice", "a recipient has one wrap", wraps(lambda w: w * 2))
    yield add(
        "short-wrap",
        "a wrap has 80 bytes",
        wraps(lambda w: [{**w[0], "wrap": "00" * 79}]),
    )
    yield add(
        "upper-case-wrap",
        "hex is lower case",
        wraps(lambda w: [{**w[0], "wrap": "AB" * 80}]),
    )
    yield add(
        "signer-as-recipient",
        "recipients have keys of X25519",
        wraps(lambda w: [{**w[0], "key_id": KEY.public.key_id}]),
    )
    yield add(
        "blob-twice",
        "a message stands once",
        lambda v: v["blobs"].append(v["blobs"][0]),
    )
    yield add("unknown-field", "no unknown field", lambda v: v.update(identity={}))
    yield add("missing-field", "every field is there", lambda v: v.pop("tokens"))
    yield add(
        "33-recipients",
        "there are at most 32 recipients",
        wraps(lambda w: w * 33),
        "limit_exceeded",
    )
    yield add(
        "large-private-part",
        "a private part has at most 16 MiB",
        lambda v: v["private"].update(size=1 << 30),
        "limit_exceeded",
    )
    yield add(
        "version-2",
        "the version is 1",
        lambda v: v.update(format_version=2),
        "unsupported_version",
    )
    messages = SEALED.messages()
    for index, name in ((0, "private"), (1, "tokens"), (2, "blob")):
        wrong = [*messages]
        wrong[index] = _flip(messages[index])
        data = packed(SEALED, wrong)
        if index == 2:
            data = _renamed(messages, wrong)
        yield sealed_case(
            f"sealed-unopened-{name}-flipped",
            "digest_mismatch",
            "relays check messages, too",
            data,
            recipient=None,
        )
        code = "decryption" if index == 2 else "digest_mismatch"
        yield sealed_case(
            f"sealed-opened-{name}-flipped", code, "messages are the signed ones", data
        )
    yield sealed_case(
        "sealed-expired",
        "expired",
        "terms are policed outside",
        packed(SEALED, messages),
        now=BASE.expires,
        recipient=None,
    )


def _renamed(messages: list[bytes], wrong: list[bytes]) -> bytes:
    """A container with wrong messages under the names of the signed ones."""
    names = [blob_name(blob_digest(m)) for m in messages[2:]]
    head = [
        ("envelope.json", SEALED.signed()),
        ("private.json", wrong[0]),
        ("tokens", wrong[1]),
    ]
    return pack([*head, *zip(names, wrong[2:], strict=True)])


def _wraps() -> Iterator[Case]:
    good = packed(SEALED, SEALED.messages())
    yield sealed_case(
        "sealed-for-others",
        "wrong_recipient",
        "a wrap is for the verifier",
        good,
        recipient=OTHER_READER,
    )
    two = recipients(READER, OTHER_READER)

    def swapped(value: Any) -> None:
        first, second = value["recipients"]
        first["wrap"], second["wrap"] = second["wrap"], first["wrap"]

    yield sealed_case(
        "sealed-wraps-swapped",
        "decryption",
        "a wrap is for its recipient",
        outside(swapped, two),
    )

    def flipped(value: Any) -> None:
        text = value["recipients"][0]["wrap"]
        value["recipients"][0]["wrap"] = text[:-1] + ("0" if text[-1] != "0" else "1")

    yield sealed_case(
        "sealed-wrap-flipped", "decryption", "a wrap opens", outside(flipped)
    )

    def of_another(value: Any) -> None:
        other = wrap(READER.public, b"c" * 32, bytes(16))
        value["recipients"][0]["wrap"] = other.wrapped.hex()

    yield sealed_case(
        "sealed-wrap-of-another-artifact",
        "decryption",
        "a wrap is for its nonce",
        outside(of_another),
    )

    def zero(value: Any) -> None:
        value["recipients"][0]["wrap"] = "00" * 80

    yield sealed_case(
        "sealed-wrap-zero", "decryption", "a share is not zero", outside(zero)
    )

    def other_key(value: Any) -> None:
        nonce = bytes.fromhex(value["nonce"])
        value["recipients"][0]["wrap"] = wrap(
            READER.public, b"x" * 32, nonce
        ).wrapped.hex()

    yield sealed_case(
        "sealed-other-content-key",
        "decryption",
        "the content key opens the private part",
        outside(other_key),
    )


def _inside() -> Iterator[Case]:
    def add(name: str, code: str, breaks: str, data: bytes, **given: Any) -> Case:
        return sealed_case(f"sealed-inside-{name}", code, breaks, data, **given)

    private = SEALED.part().encode()
    yield add(
        "other-context",
        "decryption",
        "the private part is of its nonce",
        with_private(private, context=private_context("00" * 16)),
    )
    yield add(
        "blob-context",
        "decryption",
        "messages say what they are",
        with_private(private, context=BLOB_CONTEXT),
    )
    yield add("not-json", "format", "the private part is JSON", with_private(b"kvport"))
    yield add(
        "not-canonical",
        "format",
        "the private part is canonical",
        with_private(private + b"\n"),
    )
    yield add(
        "unknown-field",
        "format",
        "no unknown field",
        inside(lambda v: v.update(more=1)),
    )
    yield add(
        "short-key",
        "format",
        "keys have 32 bytes",
        inside(lambda v: v["keys"].update(tokens="00" * 31)),
    )
    yield add(
        "version-2",
        "unsupported_version",
        "the manifest inside is of v1",
        inside(lambda v: v["manifest"].update(format_version=2)),
    )
    yield add(
        "other-scope",
        "arithmetic",
        "terms inside are those outside",
        inside(lambda v: v["manifest"].update(scope="other")),
    )
    yield add(
        "other-nonce",
        "arithmetic",
        "terms inside are those outside",
        inside(lambda v: v["manifest"].update(nonce="00" * 16)),
    )
    yield add(
        "key-missing",
        "arithmetic",
        "every blob has a key",
        inside(lambda v: v["keys"]["blobs"].pop()),
    )
    yield add(
        "key-too-many",
        "arithmetic",
        "every key has a blob",
        inside(lambda v: v["keys"]["blobs"].append("00" * 32)),
    )
    yield add(
        "other-key",
        "decryption",
        "a blob's key opens it",
        inside(lambda v: v["keys"]["blobs"].__setitem__(0, "00" * 32)),
    )
    yield add(
        "other-tokens-key",
        "decryption",
        "the tokens' key opens them",
        inside(lambda v: v["keys"].update(tokens="00" * 32)),
    )
    yield add(
        "gap",
        "arithmetic",
        "what is inside adds up",
        inside(lambda v: v["manifest"]["segments"][1].update(start=5)),
    )
    yield add(
        "other-digest",
        "digest_mismatch",
        "blobs have the digest inside",
        inside(
            lambda v: v["manifest"]["segments"][0]["blobs"][0].update(
                digest="blake3:" + "00" * 32
            )
        ),
    )
    yield add(
        "other-key-of-the-prefix",
        "token_mismatch",
        "keys are those of the ids",
        inside(lambda v: v["manifest"]["segments"][0].update(key="00" * 32)),
    )

    def from_lost(value: Any) -> None:
        value["manifest"]["origins"] = [LOST.public.key_id]

    lost = revoking(BASE.trust(), LOST)
    yield add(
        "revoked-origin",
        "revoked_key",
        "no state comes from a revoked key",
        inside(from_lost),
        trust=lost,
    )
    other = BASE.local(tokenizer=BlobDigest(TOKENIZER[::-1]))
    good = packed(SEALED, SEALED.messages())
    yield add(
        "other-tokenizer",
        "binding_mismatch",
        "state fits the model here",
        good,
        local=other,
        fields=["tokenizer"],
    )
    models = BASE.trust(models=frozenset({"another"}))
    yield add(
        "other-model",
        "untrusted_key",
        "a signer brings state of its models",
        good,
        trust=models,
    )


def _messages() -> Iterator[Case]:
    messages = SEALED.messages()
    keys = SEALED.part().blob_keys

    def add(name: str, code: str, breaks: str, data: bytes, **given: Any) -> Case:
        return sealed_case(f"sealed-message-{name}", code, breaks, data, **given)

    tokens = BASE.token_bytes
    as_blob = seal_message(TOKENS_KEY, BLOB_CONTEXT, SALT, tokens)
    yield add(
        "tokens-as-blob",
        "decryption",
        "messages say what they are",
        resigned([messages[0], as_blob, *messages[2:]]),
    )
    other_ids = seal_message(TOKENS_KEY, TOKENS_CONTEXT, SALT, tokens[:-1] + b"\1")
    yield add(
        "other-ids",
        "token_mismatch",
        "ids have the digest inside",
        resigned([messages[0], other_ids, *messages[2:]]),
    )
    yield add(
        "flipped",
        "decryption",
        "messages are authentic",
        resigned([*messages[:-1], _flip(messages[-1])]),
    )
    yield add(
        "salt-flipped",
        "decryption",
        "the salt is committed to",
        resigned([*messages[:-1], _flip(messages[-1], 0)]),
    )
    yield add(
        "commitment-flipped",
        "decryption",
        "the key is committed to",
        resigned([*messages[:-1], _flip(messages[-1], 24)]),
    )
    short = seal_message(keys[0], BLOB_CONTEXT, SALT, bytes(7))
    yield add(
        "size",
        "arithmetic",
        "a message has the size of its content",
        resigned([*messages[:2], short, *messages[3:]]),
    )
    yield add(
        "missing",
        "arithmetic",
        "there is a message for each blob",
        resigned(messages[:-1]),
    )
    swapped = [*messages[:3], messages[4], messages[3]]
    yield add(
        "swapped",
        "arithmetic",
        "messages stand in the manifest's order",
        resigned(swapped),
    )
    chunk = 16384 + 16
    for name, change in (
        (
            "chunks-swapped",
            lambda m: (
                m[:56]
                + m[56 + chunk : 56 + 2 * chunk]
                + m[56 : 56 + chunk]
                + m[56 + 2 * chunk :]
            ),
        ),
        (
            "chunk-repeated",
            lambda m: m[: 56 + chunk] + m[56 : 56 + chunk] + m[56 + 2 * chunk :],
        ),
    ):
        yield add(
            name,
            "decryption",
            "chunks have one order",
            resigned(large_messages(change), LARGE),
            builder=LARGE,
        )
