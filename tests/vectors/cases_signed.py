"""Envelopes out of form, signatures that do not hold, signers that are not trusted."""

import base64
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import Envelope, Signature, encode_envelope, pae
from kvport.manifest.keys import SigningKey
from kvport.manifest.trust import Role, TrustList
from tests.manifest.builder import KEY, NOW, OTHER_KEY, ManifestBuilder
from tests.vectors.case import Case, document, trust_value
from tests.vectors.making import BASE, BOTH, case, payload
from tests.vectors.trust_making import ADMIN, DOCUMENT, FULL, given, revoking

ORDER = 2**252 + 27742317777372353535851937790883648493
ISSUER = KEY.public.key_id


def _envelope(
    *signatures: tuple[str, bytes],
    kind: str = PayloadType.MANIFEST,
    data: bytes | None = None,
) -> bytes:
    parts = tuple(Signature(*signature) for signature in signatures)
    content = BASE.manifest().encode() if data is None else data
    return encode_envelope(Envelope(content, kind, parts))


def cases() -> Iterator[Case]:
    yield from _form()
    yield from _signatures()
    yield from _signers()
    yield from _lists()


def _form() -> Iterator[Case]:
    good = BASE.signed()
    head, rest = good.split(b'","payloadType":"')
    kind, signatures = rest.split(b'","signatures":')
    text = head.removeprefix(b'{"payload":"')
    one = signatures[1:-2]
    manifest = BASE.manifest()

    def add(
        name: str, breaks: str, envelope: bytes, code: str = "format", **given: Any
    ) -> Case:
        return case(f"envelope-{name}", code, breaks, BASE.container(envelope), **given)

    yield add("white-space", "there is no white space", good.replace(b":", b": ", 1))
    yield add("newline", "nothing follows it", good + b"\n")
    yield add(
        "order",
        "members have one order",
        b'{"payloadType":"%b","payload":"%b","signatures":%b'
        % (kind, text, signatures),
    )
    yield add(
        "member-twice",
        "members have one order",
        b'{"payload":"%b",' % text + good[1:],
    )
    yield add("unknown-member", "there are no other members", good[:-1] + b',"x":1}')
    # One more letter in an informational field, until the payload needs padding.
    for host in ("a", "ab", "abc"):
        data = payload(lambda value, host=host: value["info"].update(host=host))
        padded = BASE.signed(data)
        if b'=","payloadType' in padded:
            break
    padded_text = base64.b64encode(data)
    yield add(
        "unpadded-base64",
        "base64 is padded",
        padded.replace(padded_text, padded_text.rstrip(b"=")),
    )
    last = padded_text.rstrip(b"=")[-1:]
    other = base64.b64encode(b"~~~")[-1:]
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    loose = letters[letters.index(last) + 1 :][:1] or other
    ends = padded_text.rstrip(b"=")
    pad = padded_text[len(ends) :]
    yield add(
        "loose-bits",
        "base64 encodes back to itself",
        padded.replace(padded_text, ends[:-1] + loose + pad),
    )
    yield add(
        "line-breaks",
        "base64 is one line",
        good.replace(text, text[:76] + b"\n" + text[76:]),
    )
    yield add(
        "other-alphabet",
        "base64 is of the standard alphabet",
        _respelled(good),
    )
    yield add("no-signature", "there is a signature", good.replace(one, b""))
    yield add(
        "one-key-twice",
        "a key signs once",
        good.replace(one, one + b"," + one),
    )
    yield add(
        "unsorted",
        "signatures are sorted by key id",
        _envelope(*_two(reverse=True)),
        trust=BOTH,
    )
    keys = [SigningKey.from_bytes(bytes([n]) * 32) for n in range(9)]
    yield add(
        "nine-signatures",
        "there are at most eight signatures",
        _envelope(*sorted((k.public.key_id, k.sign(b"")) for k in keys)),
        "limit_exceeded",
    )
    yield add(
        "short-signature",
        "signatures have 64 bytes",
        good.replace(one, one[:-8] + b'"}'),
    )
    yield add(
        "upper-case-key-id",
        "key ids are in lower case",
        good.replace(one, one.replace(ISSUER.encode(), ISSUER.upper().encode())),
    )
    for name, other_kind, breaks in (
        ("in-toto-type", "application/vnd.in-toto+json", "the payload's type is ours"),
        ("trust-type", PayloadType.TRUST, "a trust document is no artifact"),
        ("version-2-type", "application/vnd.kvport.manifest.v2+json", "v2 is not v1"),
    ):
        message = pae(other_kind, manifest.encode())
        envelope = _envelope((ISSUER, KEY.sign(message)), kind=other_kind)
        yield add(name, breaks, envelope, "unsupported_version")


def _respelled(good: bytes) -> bytes:
    """An envelope whose signature has a letter of the URL-safe alphabet."""
    for n in range(200):
        envelope = BASE.signed(
            payload(lambda v, n=n: v["info"].update(host=f"mac-{n}"))
        )
        head, _, tail = envelope.rpartition(b'"sig":"')
        if b"+" in tail or b"/" in tail:
            return head + b'"sig":"' + tail.replace(b"+", b"-").replace(b"/", b"_")
    raise AssertionError("no signature with such a letter")


def _two(*, reverse: bool = False) -> list[tuple[str, bytes]]:
    message = pae(PayloadType.MANIFEST, BASE.manifest().encode())
    signed = [(key.public.key_id, key.sign(message)) for key in (KEY, OTHER_KEY)]
    return sorted(signed, reverse=reverse)


def _signatures() -> Iterator[Case]:
    data = BASE.manifest().encode()
    message = pae(PayloadType.MANIFEST, data)
    signature = KEY.sign(message)

    def add(name: str, breaks: str, envelope: bytes, **given: Any) -> Case:
        return case(
            f"signature-{name}", "signature", breaks, BASE.container(envelope), **given
        )

    flipped = bytes([signature[0] ^ 1]) + signature[1:]
    yield add("flipped-bit", "the signature verifies", _envelope((ISSUER, flipped)))
    yield add("zero", "the signature verifies", _envelope((ISSUER, bytes(64))))
    moved = signature[:32] + (
        int.from_bytes(signature[32:], "little") + ORDER
    ).to_bytes(32, "little")
    yield add("s-plus-l", "S is below the group's order", _envelope((ISSUER, moved)))
    yield add(
        "by-another-key",
        "a key id is a hint that is proven",
        _envelope((ISSUER, OTHER_KEY.sign(message))),
        trust=BOTH,
    )
    yield add(
        "over-the-payload",
        "what is signed is the PAE",
        _envelope((ISSUER, KEY.sign(data))),
    )
    sealed = KEY.sign(pae(PayloadType.SEALED, data))
    yield add("over-another-type", "the type is signed", _envelope((ISSUER, sealed)))
    longer = data.replace(b'"host":"mac-a.local"', b'"host":"mac-b.local"')
    yield add(
        "over-another-payload",
        "the payload is signed",
        _envelope((ISSUER, signature), data=longer),
    )
    (first, one), (second, two) = _two()
    bad = bytes([two[0] ^ 1]) + two[1:]
    yield add(
        "second-wrong",
        "every signature verifies",
        _envelope((first, one), (second, bad)),
        trust=BOTH,
    )
    yield add(
        "not-by-the-issuer",
        "the issuer signs",
        BASE.signed(signers=[OTHER_KEY]),
        trust=BOTH,
    )


def _signers() -> Iterator[Case]:
    good = BASE.container()

    def add(
        name: str, breaks: str, trust: object, data: bytes = good, **given: Any
    ) -> Case:
        return case(
            f"signer-{name}", "untrusted_key", breaks, data, trust=trust, **given
        )

    other = ManifestBuilder(key=OTHER_KEY).trust()
    yield add("unlisted", "signers are listed", other)
    yield add("of-an-empty-list", "signers are listed", TrustList())
    both = BASE.container(BASE.signed(signers=[KEY, OTHER_KEY]))
    yield add("second-unlisted", "all signers are listed", BASE.trust(), both)
    past = BASE.trust(not_after=NOW)
    yield add("past-its-trust", "trust ends at not_after", past)
    early = BASE.trust(not_before=NOW + timedelta(seconds=1))
    yield add("before-its-trust", "trust begins at not_before", early)
    yield add(
        "without-role", "signers have the role export", BASE.trust(roles=frozenset())
    )
    models = BASE.trust(models=frozenset({"another"}))
    yield add("of-other-models", "a signer brings state of its models", models)
    no_export = BASE.trust(roles=frozenset({Role.TRUST}))
    yield add("of-documents-only", "signers have the role export", no_export)
    yield from _given()
    yield from _revoked()


def _given() -> Iterator[Case]:
    """Signers that a trust document gives, and no longer or not for this."""

    def add(name: str, code: str, breaks: str, trust: TrustList, **given: Any) -> Case:
        return case(
            f"given-{name}", code, breaks, BASE.container(), trust=trust, **given
        )

    late = DOCUMENT.expires
    expired = attrs.evolve(BASE, expires=late + timedelta(days=1))
    data = BASE.container(expired.signed())
    yield case(
        "given-until-the-document-expires",
        "untrusted_key",
        "what a document gives ends with it",
        data,
        trust=given(),
        now=late,
    )
    own = given(roles=frozenset({Role.EXPORT}))
    yield add("by-no-issuer", "untrusted_key", "its signers have the role trust", own)
    none = attrs.evolve(given(), entries=())
    yield add("by-nobody", "untrusted_key", "its signers are listed", none)
    ended = given(not_after=NOW)
    yield add("too-late", "untrusted_key", "no more time than its signer has", ended)
    scopes = given(scopes=frozenset({"other"}))
    yield add(
        "other-scope", "wrong_scope", "no more scopes than its signer has", scopes
    )
    models = given(models=frozenset({"another"}))
    yield add(
        "other-model", "untrusted_key", "no more models than its signer has", models
    )
    operator = given().with_entry(BASE.trust(models=frozenset({"another"})).entries[0])
    yield add(
        "in-place-of-an-entry", "untrusted_key", "the operator's entry counts", operator
    )
    revoked = revoking(given(), ADMIN)
    yield add(
        "by-a-revoked-key", "untrusted_key", "its signers are not revoked", revoked
    )


def _revoked() -> Iterator[Case]:
    def add(
        name: str, breaks: str, data: bytes, trust: TrustList, **given: Any
    ) -> Case:
        return case(
            f"revoked-{name}", "revoked_key", breaks, data, trust=trust, **given
        )

    good = BASE.container()
    yield add("signer", "no signer is revoked", good, revoking(BASE.trust(), KEY))
    alone = revoking(TrustList(), KEY)
    yield add("signer-unlisted", "no signer is revoked", good, alone)
    both = BASE.container(BASE.signed(signers=[KEY, OTHER_KEY]))
    yield add("second-signer", "no signer is revoked", both, revoking(BOTH, OTHER_KEY))

    def from_both(value: dict[str, Any]) -> None:
        keys = sorted([KEY.public.key_id, OTHER_KEY.public.key_id])
        value["origins"] = keys
        mine = keys.index(KEY.public.key_id)
        for part in (*value["segments"], *value["points"]):
            part["origins"] = [mine]
        value["segments"][0]["origins"] = [0, 1]

    origin = BASE.container(BASE.signed(payload(from_both)))
    trust = revoking(BASE.trust(), OTHER_KEY)
    yield add("origin", "no state comes from a revoked key", origin, trust)


def _lists() -> Iterator[Case]:
    good = BASE.container()

    def add(name: str, code: str, breaks: str, trust: bytes) -> Case:
        return case(f"list-{name}", code, breaks, good, trust=trust)

    data = BASE.trust().to_json()
    value = trust_value(BASE.trust())
    raw, key_id = KEY.public.raw.hex(), KEY.public.key_id
    for name, weak in (
        ("neutral", "01" + "00" * 31),
        (
            "of-order-8",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        ),
    ):
        yield add(
            f"weak-key-{name}",
            "weak_key",
            "keys are no points of small order",
            data.replace(raw.encode(), weak.encode()),
        )
    second = (2**255 - 19 + 3).to_bytes(32, "little").hex().encode()
    yield add(
        "second-encoding",
        "format",
        "keys have one encoding",
        data.replace(raw.encode(), second),
    )
    wrong = data.replace(key_id.encode(), OTHER_KEY.public.key_id.encode())
    yield add("wrong-key-id", "format", "a key id is that of its key", wrong)
    yield add(
        "twice",
        "format",
        "a key has one entry",
        _canonical(value, entries=value["entries"] * 2),
    )
    ordered = trust_value(BOTH)["entries"]
    yield add(
        "unsorted",
        "format",
        "entries are sorted",
        _canonical(value, entries=ordered[::-1]),
    )
    yield add("pretty", "format", "the list is canonical JSON", document(value))
    yield add(
        "version-2",
        "format",
        "the list's version is 1",
        _canonical(value, format_version=2),
    )
    full = trust_value(revoking(FULL, KEY))
    adopted = full["documents"][0]
    for name, breaks, other in (
        (
            "revocations-unsorted",
            "revocations are sorted",
            {"revoked": full["revoked"][::-1]},
        ),
        (
            "documents-twice",
            "an issuer has one document",
            {"documents": [adopted] * 2},
        ),
        (
            "role-from-a-document",
            "documents give the role export",
            {
                "documents": [
                    {
                        **adopted,
                        "entries": [{**adopted["entries"][0], "roles": ["trust"]}],
                    }
                ]
            },
        ),
        (
            "document-of-another",
            "an issuer signs",
            {"documents": [{**adopted, "signers": [KEY.public.key_id]}]},
        ),
        (
            "document-version-0",
            "versions begin at 1",
            {"documents": [{**adopted, "version": 0}]},
        ),
        (
            "unknown-role",
            "roles are known",
            {"entries": [{**full["entries"][0], "roles": ["import"]}]},
        ),
    ):
        yield add(name, "format", breaks, _canonical(full, **other))


def _canonical(value: dict[str, Any], **other: Any) -> bytes:
    return canonical_dumps({**value, **other})
