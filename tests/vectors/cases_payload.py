"""Signed payloads out of form, terms that forbid, and models that do not fit."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs

from kvport.manifest.digests import BlobDigest
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import sign_payload
from kvport.manifest.layout import StateLayout
from tests.manifest.builder import (
    DENSE,
    KEY,
    KV,
    NOW,
    OTHER_KEY,
    TOKENIZER,
    WHOLE,
    identity_of,
)
from tests.vectors.case import Case
from tests.vectors.making import BASE, Change, case, edited, spelled
from tests.vectors.sealed_making import SEALED


def cases() -> Iterator[Case]:
    yield from _spelling()
    yield from _fields()
    yield from _layouts()
    yield from _terms()
    yield from _binding()


def _raw(data: bytes) -> bytes:
    return BASE.container(BASE.signed(data))


def _spelling() -> Iterator[Case]:
    good = BASE.manifest().encode()

    def add(name: str, breaks: str, data: bytes, code: str = "format") -> Case:
        return case(f"json-{name}", code, breaks, data)

    yield add("byte-order-mark", "no byte order mark", _raw(b"\xef\xbb\xbf" + good))
    yield add("trailing-newline", "nothing follows", _raw(good + b"\n"))
    yield add(
        "white-space", "no white space", spelled(b'"block_size":4', b'"block_size": 4')
    )
    yield add("float", "no fractions", spelled(b'"block_size":4', b'"block_size":4.0'))
    yield add(
        "exponent", "no exponents", spelled(b'"block_size":4', b'"block_size":4e0')
    )
    yield add("minus-zero", "no second zero", spelled(b'"start":0', b'"start":-0'))
    yield add(
        "leading-zero",
        "no leading zeros",
        spelled(b'"block_size":4', b'"block_size":04'),
    )
    yield add("nan", "no NaN", spelled(b'"block_size":4', b'"block_size":NaN'))
    yield add("null", "no null", spelled(b'"host":"mac-a.local"', b'"host":null'))
    yield add(
        "key-twice",
        "no key twice",
        spelled(b'"block_size":4', b'"block_size":4,"block_size":4'),
    )
    yield add(
        "escape",
        "one spelling of letters",
        spelled(b'"mac-a.local"', b'"m\\u0061c-a.local"'),
    )
    yield add(
        "surrogate", "no lone surrogates", spelled(b'"mac-a.local"', b'"\\ud800"')
    )
    yield add("not-utf-8", "UTF-8", spelled(b'"mac-a.local"', b'"\xff"'))
    yield add(
        "upper-case-key",
        "keys are lower case",
        spelled(b'"quant":{}', b'"quant":{"Bits":4}'),
    )
    unsorted = spelled(
        b'"chat_template":"","exporter":"kvport 0.1.0"',
        b'"exporter":"kvport 0.1.0","chat_template":""',
    )
    yield add("order", "keys are sorted", unsorted)
    yield add(
        "large-integer",
        "integers are below 2^53",
        spelled(b'"quant":{}', b'"quant":{"a":9007199254740992}'),
    )
    yield add("list", "the payload is an object", _raw(b"[]"))
    yield add("text", "the payload is JSON", _raw(b"kvport"))
    deep = b"[" * 7 + b"]" * 7
    yield add(
        "depth",
        "nested at most 8 deep",
        spelled(b'"quant":{}', b'"quant":{"a":%b}' % deep),
        "limit_exceeded",
    )
    long = "é" * 257
    yield add(
        "long-string",
        "strings have at most 512 bytes",
        spelled(b'"mac-a.local"', b'"%b"' % long.encode()),
        "limit_exceeded",
    )


def _fields() -> Iterator[Case]:
    def add(name: str, breaks: str, change: Change, code: str = "format") -> Case:
        return case(f"manifest-{name}", code, breaks, edited(change))

    def put(*path: Any) -> Change:
        *above, last, new = path

        def change(value: Any) -> None:
            for step in above:
                value = value[step]
            value[last] = new

        return change

    yield add("unknown-field", "no unknown field", put("annotations", {}))
    yield add("unknown-field-inside", "no unknown field", put("prefix", "text", ""))
    yield add("missing-field", "every field is there", lambda v: v.pop("session"))
    yield add(
        "missing-field-inside",
        "every field is there",
        lambda v: v["segments"][0].pop("lineage"),
    )
    yield add("boolean-for-a-number", "true is not 1", put("format_version", True))
    yield add("text-for-a-number", "numbers are numbers", put("block_size", "4"))
    yield add("other-format", "the format is kvport", put("format", "kvport2"))
    yield add(
        "version-2", "the version is 1", put("format_version", 2), "unsupported_version"
    )
    yield add(
        "other-kind",
        "the kind is prefix",
        put("artifact_kind", "suffix"),
        "unsupported_version",
    )
    yield add("negative", "no negative sizes", put("segments", 0, "start", -1))
    yield add("block-size-0", "a block has a token", put("block_size", 0))
    yield add(
        "large-block",
        "a block has at most 8192 tokens",
        put("block_size", 8193),
        "limit_exceeded",
    )
    yield add(
        "many-tokens",
        "at most 2^20 tokens",
        put("prefix", "tokens", (1 << 20) + 1),
        "limit_exceeded",
    )
    yield add(
        "large-blob",
        "a blob has at most 1 GiB",
        put("segments", 0, "blobs", 0, "size", (1 << 30) + 1),
        "limit_exceeded",
    )
    yield add(
        "upper-case-digest",
        "hex is lower case",
        lambda v: v.update(tokenizer="blake3:" + v["tokenizer"][7:].upper()),
    )
    yield add(
        "digest-of-another-algorithm",
        "digests are of BLAKE3",
        lambda v: v.update(tokenizer="sha256:" + v["tokenizer"][7:]),
    )
    yield add(
        "digest-newline",
        "nothing follows a digest",
        lambda v: v.update(tokenizer=v["tokenizer"] + "\n"),
    )
    yield add(
        "time-with-zone",
        "times have one spelling",
        put("created", "2026-03-01T12:00:00+00:00"),
    )
    yield add(
        "time-with-fraction",
        "times have one spelling",
        put("created", "2026-03-01T12:00:00.5Z"),
    )
    yield add("day-that-is-not", "days exist", put("created", "2026-02-30T12:00:00Z"))
    yield add(
        "hour-24", "times have one spelling", put("created", "2026-02-28T24:00:00Z")
    )
    yield add("short-nonce", "a nonce has 16 bytes", put("nonce", "00" * 15))
    yield add("label", "labels have no slash", put("scope", "team/a"))
    yield add(
        "terminal-escape", "names are printable", put("issuer", "name", "\x1b[2J")
    )
    yield add(
        "session-without-sequence",
        "a session has both or neither",
        put("session", "sequence", 0),
    )
    yield add(
        "sequence-without-session",
        "a session has both or neither",
        put("session", "id", ""),
    )
    yield add(
        "audience-unsorted",
        "the audience is sorted",
        put(
            "audience",
            sorted([KEY.public.key_id, OTHER_KEY.public.key_id], reverse=True),
        ),
    )
    yield add(
        "unknown-lineage", "lineage is known", put("segments", 0, "lineage", "warm")
    )
    yield add(
        "unknown-codec",
        "codecs are known",
        put("segments", 0, "blobs", 0, "codec", "zstd"),
    )
    yield add(
        "unknown-class",
        "classes of blobs are known",
        put("segments", 0, "blobs", 0, "class", "keys"),
    )
    yield add(
        "unknown-point", "kinds of points are known", put("points", 0, "kinds", ["end"])
    )
    yield add(
        "points-unsorted",
        "kinds of points are sorted",
        put("points", 0, "kinds", ["reply", "fork"]),
    )
    yield add("no-origin", "state has an origin", put("segments", 0, "origins", []))
    yield add(
        "origin-out-of-the-table",
        "origins are rows",
        put("segments", 0, "origins", [1]),
    )
    yield add(
        "numerics-out-of-the-table",
        "numerics are rows",
        put("segments", 0, "numerics", 1),
    )
    yield add(
        "unused-origin",
        "no row is unused",
        lambda v: v.update(origins=sorted([*v["origins"], OTHER_KEY.public.key_id])),
    )
    yield add(
        "unused-numerics",
        "no row is unused",
        lambda v: v["numerics"].append({**v["numerics"][0], "chunk": 1024}),
    )
    yield add("chunk-0", "a chunk has a token", put("numerics", 0, "chunk", 0))
    sealed = SEALED.manifest().encode()
    yield case(
        "manifest-that-is-sealed",
        "unsupported_version",
        "the type says what it is",
        BASE.container(BASE.signed(sealed)),
    )
    plain = sign_payload(BASE.manifest().encode(), [KEY], PayloadType.SEALED)
    yield case(
        "sealed-that-is-plain",
        "unsupported_version",
        "the type says what it is",
        BASE.container(plain),
    )


def _layouts() -> Iterator[Case]:
    def add(
        name: str, breaks: str, index: int, code: str = "format", **fields: Any
    ) -> Case:
        def change(value: Any) -> None:
            value["identity"]["layout"][index].update(fields)

        return case(f"layout-{name}", code, breaks, edited(change), local=None)

    leaf = {"dtype": "F16", "name": "k", "shape": [1, 2, -1, 3]}
    yield add("unknown-kind", "kinds are known", 0, kind="KVCache")
    yield add("contradiction", "a kind has its class", 0, **{"class": "windowed"})
    yield add("unknown-dtype", "dtypes are known", 0, leaves=[{**leaf, "dtype": "F8"}])
    yield add(
        "two-row-dimensions",
        "one dimension counts rows",
        0,
        leaves=[{**leaf, "shape": [-1, -1]}],
    )
    yield add(
        "no-row-dimension",
        "one dimension counts rows",
        0,
        leaves=[{**leaf, "shape": [4]}],
    )
    yield add(
        "rows-in-a-state", "a state has no rows", 1, leaves=[{**leaf, "name": "s0"}]
    )
    yield add("leaf-twice", "leaves have names of their own", 0, leaves=[leaf, leaf])
    yield add(
        "path-like-leaf",
        "names of leaves are no paths",
        0,
        leaves=[{**leaf, "name": "../k"}],
    )
    yield add("leading-zero", "numbers have one spelling", 0, cache="00")
    yield add("order", "caches are sorted", 0, cache="7")
    yield add("member-of-a-cache", "a cache with leaves has no members", 1, cache="0.1")
    yield add("no-leaves", "rows have leaves", 0, leaves=[])
    yield add("more-leaves-than-slots", "leaves fit the slots", 1, slots=0)
    huge = {**leaf, "shape": [1, 2**31 - 1, -1, 1]}
    yield add("huge", "a blob has at most 1 GiB", 0, "limit_exceeded", leaves=[huge])
    large = {**leaf, "shape": [2**31 - 1] * 7 + [-1]}
    yield add(
        "overflow", "sizes do not wrap around", 0, "limit_exceeded", leaves=[large]
    )


def _terms() -> Iterator[Case]:
    good = BASE.container()

    def add(
        name: str, code: str, breaks: str, data: bytes = good, **given: Any
    ) -> Case:
        return case(f"terms-{name}", code, breaks, data, **given)

    yield add("expired", "expired", "it expires at its time", now=BASE.expires)
    future = attrs.evolve(BASE, created=NOW + timedelta(seconds=301))
    yield add(
        "from-the-future",
        "expired",
        "clocks differ by at most 300 s",
        BASE.container(future.signed()),
    )
    others = attrs.evolve(BASE, audience=(OTHER_KEY.public.key_id,))
    # The builder's own verification is of no audience: its entries are the plain one's.
    data = BASE.container(others.signed())
    yield add("for-others", "wrong_scope", "the audience includes the verifier", data)
    yield add(
        "for-others-than-this",
        "wrong_scope",
        "the audience includes the verifier",
        data,
        own_key=KEY.public.key_id,
    )
    scoped = BASE.trust(scopes=frozenset({"other"}))
    yield add(
        "scope", "wrong_scope", "signers are trusted with the scope", trust=scoped
    )


VERSIONS = {"mlx_lm", "state_format"}


def _binding() -> Iterator[Case]:
    def add(
        name: str, fields: list[str], *, local: Any = None, **identity: Any
    ) -> Case:
        fitting = BASE.local()
        other = attrs.evolve(
            fitting,
            identity=attrs.evolve(fitting.identity, **identity),
            **(local or {}),
        )
        return case(
            f"binding-{name}",
            "version_mismatch" if VERSIONS.issuperset(fields) else "binding_mismatch",
            "state fits the model here",
            BASE.container(),
            local=other,
            fields=fields,
        )

    weights = identity_of(StateLayout((KV, WHOLE)), "other weights").model_files
    yield add("other-weights", ["model_files"], model_files=weights)
    yield add("adapter", ["adapters"], adapters=(weights,))
    yield add("other-quantisation", ["quant"], quant={"bits": 4, "group_size": 64})
    yield add("other-representation", ["kv"], kv="q8")
    yield add("other-layout", ["layout"], layout=DENSE)
    yield add("other-mlx-lm", ["mlx_lm"], mlx_lm="0.32.3")
    yield add("other-state-format", ["state_format"], state_format=2)
    tokenizer = {"tokenizer": BlobDigest(TOKENIZER[::-1])}
    yield add("other-tokenizer", ["tokenizer"], local=tokenizer)
    yield add("other-block-size", ["block_size"], local={"block_size": 8})
    yield add(
        "two-differences", ["mlx_lm", "tokenizer"], local=tokenizer, mlx_lm="0.31.0"
    )
