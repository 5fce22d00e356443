"""Documents of the format, for the independent verifier: written from docs/format.md.

Names, canonical JSON, and the fields of manifests, sealed payloads and trust lists.
"""

import json
import re
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from blake3 import blake3

MIB, GIB, TOKENS, P = 1 << 20, 1 << 30, 1 << 20, 2**255 - 19
Check = Callable[[Any], object]


class RefusedError(Exception):
    def __init__(self, code: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(code)
        self.code, self.fields = code, fields


def refuse(code: str) -> NoReturn:
    raise RefusedError(code)


def need(condition: object, code: str = "format") -> None:
    if not condition:
        refuse(code)


# Sections 1 and 3: names, canonical JSON.


def kdf(context: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context="kvport/v1/" + context).digest()


def digest(data: bytes) -> str:
    return "blake3:" + blake3(data).hexdigest()


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def load(data: bytes, depth: int = 8) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items))
        return dict(items)

    def bad(_: str) -> NoReturn:
        refuse("format")

    def plain(value: Any, left: int) -> None:
        if isinstance(value, dict | list):
            need(left, "limit_exceeded")
            if isinstance(value, dict):
                need(all(re.fullmatch("[a-z][a-z0-9_]*", key) for key in value))
            for item in value.values() if isinstance(value, dict) else value:
                plain(item, left - 1)
        elif isinstance(value, str):
            need(len(value.encode()) <= 512, "limit_exceeded")
        else:
            need(isinstance(value, int) and abs(value) < 2**53)

    try:
        value = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_float=bad, parse_constant=bad
        )
        plain(value, depth)
        need(canonical(value) == data)
    except (ValueError, RecursionError):
        refuse("format")
    return value


def number(low: int, high: int, above: str = "limit_exceeded") -> Check:
    def check(value: Any) -> None:
        need(type(value) is int and value >= low)
        need(value <= high, above)

    return check


def string(pattern: str = "[^\0]*|.*", flags: int = re.DOTALL) -> Check:
    return lambda v: need(type(v) is str and re.fullmatch(pattern, v, flags))


def one_of(*values: object) -> Check:
    return lambda v: need(type(v) is str and v in values)


def items(check: Check, high: int, low: int = 0, *, ordered: bool = False) -> Check:
    def run(value: Any) -> None:
        need(type(value) is list and len(value) >= low)
        need(len(value) <= high, "limit_exceeded")
        for item in value:
            check(item)
        need(not ordered or value == sorted(set(value)))

    return run


def record(**fields: Check) -> Check:
    def run(value: Any) -> None:
        need(isinstance(value, dict) and value.keys() == fields.keys())
        for name, check in fields.items():
            check(value[name])

    return run


def time(value: Any) -> datetime:
    string(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")(value)
    try:
        found = datetime.strptime(value, "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        refuse("format")
    need(value[17:19] <= "59")
    return found


def printable(value: Any) -> None:
    need(type(value) is str and value.isprintable())


DIGEST, HEX32 = string("blake3:[0-9a-f]{64}"), string("[0-9a-f]{64}")
KEY_ID, LABEL = (
    string("ed25519:[0-9a-f]{64}"),
    string("[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
)

# Sections 5, 7 and 8: fields.

TERMS = {
    "artifact_kind": string(), "format": string(), "format_version": number(1, 1),
    "audience": items(KEY_ID, 32, ordered=True), "created": time, "expires": time,
    "issuer": record(key_id=KEY_ID, name=printable), "nonce": string("[0-9a-f]{32}"),
    "scope": LABEL,
}  # fmt: skip
WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8,
}  # fmt: skip
N31 = number(1, 2**31 - 1, "format")
KINDS = {
    "kv": ("full", {}),
    "quantized": ("full", {"bits": N31, "group_size": N31}),
    "rotating": ("windowed", {"window": N31, "keep": number(0, 2**31 - 1, "format")}),
    "chunked": ("windowed", {"window": N31}),
    "arrays": ("whole", {"slots": N31}),
}
CLASS_OF_BLOB = {"kv": "full", "window": "windowed", "state": "whole"}


def cache(value: Any) -> None:
    need(isinstance(value, dict) and value.get("kind") in KINDS)
    layer, numbers = KINDS[value["kind"]]

    def shape(dims: Any) -> None:
        need(type(dims) is list and 1 <= len(dims) <= 8)
        need(all(type(d) is int and -1 <= d < 2**31 for d in dims))
        need(dims.count(-1) == (layer != "whole"))

    leaf = record(
        dtype=one_of(*WIDTH), name=string("[a-z][a-z0-9_]{0,15}"), shape=shape
    )
    path = string(r"(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){0,3}")
    least = 0 if value["kind"] == "arrays" else 1
    record(
        **{"cache": path, "class": one_of(layer), "kind": string(), **numbers},
        leaves=items(leaf, 64, least),
    )(value)
    names = [leaf["name"] for leaf in value["leaves"]]
    need(len(set(names)) == len(names))
    need(value.get("keep", 0) < value.get("window", 1))
    need(value.get("slots", 0) <= 64, "limit_exceeded")
    need(len(names) <= value.get("slots", 64))


def layout(value: Any) -> None:
    items(cache, 4096, 1)(value)
    paths = [tuple(map(int, each["cache"].split("."))) for each in value]
    need(paths == sorted(set(paths)))
    need(not any(b[: len(a)] == a for a in paths for b in paths if a != b))


IDENTITY = record(
    adapters=items(DIGEST, sys.maxsize), kv=string(), layout=layout, mlx_lm=string(),
    model_files=DIGEST, quant=lambda v: need(type(v) is dict),
    state_format=number(-(2**53), 2**53),
)  # fmt: skip
BLOB = record(
    **{"class": one_of("kv", "window", "state")}, codec=one_of("none", "shuffle-zstd"),
    digest=DIGEST, size=number(0, GIB), encoded_size=number(0, GIB),
)  # fmt: skip
PART = {
    "blobs": items(BLOB, 3), "lineage": one_of("cold", "derived"),
    "numerics": number(0, 1023, "format"),
    "origins": items(number(0, 1023, "format"), 1024, 1, ordered=True),
}  # fmt: skip
KINDS_OF_POINT = items(one_of("fork", "prompt", "reply", "stride"), 4, 1, ordered=True)
MANIFEST = record(
    **TERMS, block_size=number(1, 8192), identity=IDENTITY, tokenizer=DIGEST,
    info=record(
        chat_template=printable, exporter=printable, hardware=printable, host=printable
    ),
    prefix=record(
        tokens=number(0, TOKENS), key=HEX32, digest=DIGEST, size=number(0, 4 * TOKENS)
    ),
    session=record(
        id=lambda v: v == "" or LABEL(v), sequence=number(0, 2**53 - 1)
    ),
    numerics=items(
        record(
            blas=string(), blas_threads=number(0, 2**53), chunk=number(1, 2**53),
            compile=lambda v: need(type(v) is bool), device=string(),
            gpu_family=string(), mlx=string(),
        ), 1024,
    ),
    origins=items(KEY_ID, 1024, ordered=True),
    segments=items(
        record(**PART, start=number(0, TOKENS), end=number(0, TOKENS), key=HEX32), 16384
    ),
    points=items(
        record(**PART, position=number(0, TOKENS), kinds=KINDS_OF_POINT), 1024
    ),
)  # fmt: skip


def sealed_size(size: int) -> int:
    return 56 + size + 16 * (size // 16384 + 1)


def message(limit: int) -> Check:
    return record(digest=DIGEST, size=number(0, sealed_size(limit)))


SEALED = record(
    **TERMS, blobs=items(message(GIB), 33792), private=message(16 * MIB),
    tokens=message(4 * MIB),
    recipients=items(
        record(key_id=string("x25519:[0-9a-f]{64}"), wrap=string("[0-9a-f]{160}")),
        32, 1,
    ),
)  # fmt: skip
PRIVATE = record(
    keys=record(blobs=items(HEX32, 33792), tokens=HEX32), manifest=lambda _: None
)


def typed(value: Any, kind: str) -> Any:
    """Step 6."""
    need(isinstance(value, dict) and value.get("format") == "kvport")
    need(type(value.get("format_version")) is int)
    need(value["format_version"] == 1, "unsupported_version")
    need(type(value.get("artifact_kind")) is str)
    need(value["artifact_kind"] == kind, "unsupported_version")
    if kind == "sealed":
        SEALED(value)
        ids = [each["key_id"] for each in value["recipients"]]
        need(ids == sorted(set(ids)))
        named = [each["digest"] for each in value["blobs"]]
        need(len(set(named)) == len(named))
        return value
    MANIFEST(value)
    need((value["session"]["id"] == "") == (value["session"]["sequence"] == 0))
    parts = [*value["segments"], *value["points"]]
    rows = list(dict.fromkeys(part["numerics"] for part in parts))
    need(rows == list(range(len(value["numerics"]))))
    need(len({canonical(row) for row in value["numerics"]}) == len(rows))
    used = {index for part in parts for index in part["origins"]}
    need(used == set(range(len(value["origins"]))))
    return value


# Section 10: trust.


def names(check: Check) -> Check:
    return lambda v: v == ["*"] or items(check, 1024, ordered=True)(v)


def name(value: Any) -> None:
    printable(value)
    need(value not in ("", "*"))


def public_key(raw: bytes) -> str:
    y = int.from_bytes(raw, "little") % 2**255
    y8 = int.from_bytes(
        bytes.fromhex(
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
        ),
        "little",
    )
    need(y % P not in (0, 1, P - 1, y8, P - y8), "weak_key")
    need(y < P)
    return "ed25519:" + kdf("key-id", raw).hex()


def keyed(check: Check) -> Check:
    """A list of at most 4,096 objects, sorted by key id, no key twice."""

    def run(value: Any) -> None:
        items(check, 4096)(value)
        ids = [each["key_id"] for each in value]
        need(ids == sorted(set(ids)))

    return run


def entry(*roles: str, exact: bool = False) -> Check:
    form = record(
        key_id=KEY_ID, public_key=HEX32, name=printable,
        not_before=time, not_after=time,
        roles=items(one_of(*roles), 1024, ordered=True), scopes=names(LABEL),
        models=names(name),
    )  # fmt: skip

    def run(value: Any) -> None:
        form(value)
        need(not exact or value["roles"] == list(roles))
        need(public_key(bytes.fromhex(value["public_key"])) == value["key_id"])

    return run


def document(value: Any) -> None:
    record(
        digest=DIGEST, entries=keyed(entry("export", exact=True)), expires=time,
        issuer=KEY_ID, signers=items(KEY_ID, 8, 1, ordered=True),
        version=number(1, 2**53 - 1),
    )(value)  # fmt: skip
    need(value["issuer"] in value["signers"])


def within(one: Any, other: Any) -> dict[str, Any]:
    """An entry, with no more scopes, models and time than another one has."""

    def common(mine: list[str], theirs: list[str]) -> list[str]:
        if theirs == ["*"]:
            return mine
        return theirs if mine == ["*"] else [each for each in mine if each in theirs]

    return {
        **one,
        "not_before": max(one["not_before"], other["not_before"]),
        "not_after": min(one["not_after"], other["not_after"]),
        "scopes": common(one["scopes"], other["scopes"]),
        "models": common(one["models"], other["models"]),
    }


def trusted(data: bytes) -> tuple[dict[str, Any], set[str]]:
    """Section 10: entries by key id, those that documents give too; what is revoked."""
    need(len(data) <= MIB, "limit_exceeded")
    value = load(data)
    record(
        documents=items(document, 4096), entries=keyed(entry("export", "trust")),
        format=one_of("kvport-trust"), format_version=number(1, 1, "format"),
        revoked=keyed(record(at=time, key_id=KEY_ID, reason=printable)),
    )(value)  # fmt: skip
    issuers = [each["issuer"] for each in value["documents"]]
    need(issuers == sorted(set(issuers)))
    revoked = {each["key_id"] for each in value["revoked"]}
    own = {each["key_id"]: each for each in value["entries"]}
    found = dict(own)
    for each in value["documents"]:
        signers = [own.get(key_id, {"roles": []}) for key_id in each["signers"]]
        believed = all("trust" in signer["roles"] for signer in signers)
        if not believed or revoked & set(each["signers"]):
            continue
        for given in each["entries"]:
            cut = {**given, "not_after": min(given["not_after"], each["expires"])}
            for signer in signers:
                cut = within(cut, signer)
            found.setdefault(given["key_id"], cut)
    return found, revoked
