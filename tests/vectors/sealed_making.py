"""Means to make sealed vectors: the same bytes each time."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import blob_digest, format_digest
from kvport.manifest.recipients import Recipient, RecipientKey
from kvport.manifest.sealed import PrivatePart, SealedManifest, Wrap, private_context
from kvport.manifest.sealing import seal_message
from kvport.manifest.ustar import blob_name
from tests.manifest.builder import pack
from tests.manifest.sealed_builder import CONTENT_KEY, READER, SALT, SealedBuilder
from tests.vectors.making import BASE, case
from tests.vectors.wrapping import wrap

OTHER_READER = RecipientKey.from_bytes(bytes(range(33, 65)))


@attrs.frozen(kw_only=True)
class FixedBuilder(SealedBuilder):
    """A sealed builder whose wraps are not drawn."""

    def wraps(self) -> tuple[Wrap, ...]:
        nonce = bytes.fromhex(self.plain.manifest().terms.nonce)
        made = [wrap(each, CONTENT_KEY, nonce) for each in self.recipients]
        return tuple(sorted(made, key=lambda each: each.recipient))

    def manifest(self, part: PrivatePart | None = None, **other: Any) -> SealedManifest:
        return super().manifest(part, **{"recipients": self.wraps(), **other})


SEALED = FixedBuilder(plain=BASE)
Change = Callable[[dict[str, Any]], None]


def outside(change: Change, builder: FixedBuilder = SEALED) -> bytes:
    """A container whose public payload was changed, then signed."""
    value = strict_loads(builder.manifest().encode())
    change(value)
    return packed(builder, builder.messages(), canonical_dumps(value))


def inside(change: Change, builder: FixedBuilder = SEALED, *, raw: Any = None) -> bytes:
    """A container whose private part was changed, then sealed and signed."""
    value = copy.deepcopy(strict_loads(builder.part().encode(), depth=9))
    change(value)
    data = canonical_dumps(value, depth=9)
    return with_private(raw(data) if raw else data, builder)


def with_private(
    data: bytes, builder: FixedBuilder = SEALED, *, context: bytes | None = None
) -> bytes:
    """A container with these bytes in place of the private part."""
    context = context or private_context(builder.plain.manifest().terms.nonce)
    _, *rest = builder.messages()
    return resigned([seal_message(CONTENT_KEY, context, SALT, data), *rest], builder)


def resigned(messages: Sequence[bytes], builder: FixedBuilder = SEALED) -> bytes:
    """A container with these messages; digests and sizes of them are signed."""
    value = strict_loads(builder.manifest().encode())
    private, tokens, *blobs = [
        {"digest": format_digest(blob_digest(data)), "size": len(data)}
        for data in messages
    ]
    value.update(private=private, tokens=tokens, blobs=blobs)
    return packed(builder, messages, canonical_dumps(value))


def packed(
    builder: FixedBuilder, messages: Sequence[bytes], payload: bytes | None = None
) -> bytes:
    """A container with these messages, whatever the payload says."""
    private, tokens, *blobs = messages
    named = [(blob_name(blob_digest(blob)), blob) for blob in blobs]
    head = [("envelope.json", builder.signed(payload)), ("private.json", private)]
    return pack([*head, ("tokens", tokens), *named])


def sealed_case(
    name: str,
    code: str | None,
    breaks: str,
    container: bytes,
    builder: FixedBuilder = SEALED,
    **given: Any,
) -> Any:
    """A case that is opened by the first recipient's key."""
    return case(
        name, code, breaks, container, builder.plain, **{"recipient": READER, **given}
    )


def recipients(*keys: RecipientKey) -> FixedBuilder:
    """A builder for these."""
    public: list[Recipient] = [key.public for key in keys]
    return FixedBuilder(plain=BASE, recipients=public)
