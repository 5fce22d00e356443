"""A second verifier of artifacts, written from docs/format.md alone.

With its parts (independent_*.py) it shares no code with kvport: it uses the standard
library, `blake3` and `cryptography`, of the latter only Ed25519, X25519 and AES-GCM.
Python 3.11 has no decoder for zstd: of an encoded blob with compressed blocks only the
frame's form is checked; raw and run-length blocks are decoded. It reads whole files,
which a product must not.

    python -m tests.vectors.independent tests/vectors/v1/valid/sealed
"""

import base64
import json
import re
import struct
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.vectors.independent_blobs import blob_form, check_blob
from tests.vectors.independent_fields import (
    CLASS_OF_BLOB,
    GIB,
    MIB,
    RefusedError,
    canonical,
    digest,
    kdf,
    load,
    need,
    refuse,
    sealed_size,
    time,
    trusted,
    typed,
)
from tests.vectors.independent_sealing import open_message, open_private

MANIFEST_TYPE = "application/vnd.kvport.manifest.v1+json"
SEALED_TYPE = "application/vnd.kvport.sealed.v1+json"

# Section 2: the container.


class Container:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        need(self.at + size <= len(self.data), "container")
        self.at += size
        return self.data[self.at - size : self.at]

    def entry(self, entry_name: str, size: int | None = None) -> bytes:
        received = self.take(512)
        if size is None:
            need(re.fullmatch(rb"[0-7]{11}\0", received[124:136]), "container")
            size = int(received[124:135], 8)
            need(size <= 16 * MIB, "limit_exceeded")
        block = bytearray(512)
        for at, value in (
            (0, entry_name.encode()), (100, b"0000600\0"), (108, b"0000000\0" * 2),
            (124, b"%011o\0" % size), (136, b"0" * 11 + b"\0"), (148, b" " * 8),
            (156, b"0"), (257, b"ustar\x0000"),
        ):  # fmt: skip
            block[at : at + len(value)] = value
        block[148:156] = b"%06o\0 " % sum(block)
        need(received == block, "container")
        content = self.take(size)
        need(not any(self.take(-size % 512)), "container")
        return content

    def end(self) -> None:
        need(self.data[self.at :] == bytes(1024), "container")


# Section 4: the envelope.


def unbase64(text: bytes) -> bytes:
    try:
        value = base64.b64decode(text, validate=True)
    except ValueError:
        refuse("format")
    need(base64.b64encode(value) == text)
    return value


def envelope(data: bytes) -> tuple[bytes, str, list[tuple[str, bytes]]]:
    """Payload, type, and signatures by key id."""
    found = re.fullmatch(
        rb'\{"payload":"([^"]*)","payloadType":"([!#-\[\]-~]{1,127})","signatures":\['
        rb'((?:\{"keyid":"ed25519:[0-9a-f]{64}","sig":"[A-Za-z0-9+/]{86}=="\},?)+)\]\}',
        data,
    )
    need(found and not found[3].endswith(b","))
    pairs = re.findall(rb'"keyid":"([^"]*)","sig":"([^"]*)"', found[3])
    need(found[3].count(b"},{") == len(pairs) - 1)
    need(len(pairs) <= 8, "limit_exceeded")
    signatures = [(key_id.decode(), unbase64(sig)) for key_id, sig in pairs]
    ids = [key_id for key_id, _ in signatures]
    need(ids == sorted(set(ids)))
    return unbase64(found[1]), found[2].decode(), signatures


def check_signatures(
    payload: bytes, kind: str, signatures: list[tuple[str, bytes]], trust: Any, now: Any
) -> list[Any]:
    """Step 4: the signers' entries."""
    (allowed, revoked), entries = trust, []
    for key_id, _ in signatures:
        need(key_id not in revoked, "revoked_key")
        need(entry := allowed.get(key_id), "untrusted_key")
        within = time(entry["not_before"]) <= now < time(entry["not_after"])
        need(within and "export" in entry["roles"], "untrusted_key")
        entries.append(entry)
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    for entry, (_, signature) in zip(entries, signatures, strict=True):
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["public_key"]))
        try:
            key.verify(signature, message)
        except InvalidSignature:
            refuse("signature")
    return entries


def check_terms(value: Any, entries: list[Any], now: datetime, own_key: Any) -> None:
    """Steps 7 and 8."""
    need(value["issuer"]["key_id"] in [e["key_id"] for e in entries], "signature")
    need(time(value["created"]) <= now + timedelta(seconds=300), "expired")
    need(time(value["expires"]) > now, "expired")
    need(not value["audience"] or own_key in value["audience"], "wrong_scope")
    need(all(allows(e["scopes"], value["scope"]) for e in entries), "wrong_scope")


def allows(given: list[str], one: str) -> bool:
    return given == ["*"] or one in given


# Section 9: sums, then tokens and blobs.


def sums(value: Any) -> list[tuple[Any, bytes, list[Any]]]:
    """The different blobs in the container's order, with header and sizes."""
    caches, size, at = value["identity"]["layout"], value["block_size"], 0
    classes = {each["class"] for each in caches}
    prefix, segments, points = value["prefix"], value["segments"], value["points"]
    need(prefix["tokens"] and prefix["size"] == 4 * prefix["tokens"], "arithmetic")
    for each in segments:
        need(each["start"] == at < each["end"], "arithmetic")
        need(at // size == (each["end"] - 1) // size, "arithmetic")
        at = each["end"]
    need(at == prefix["tokens"], "arithmetic")
    need(segments[-1]["key"] == prefix["key"], "arithmetic")
    ends, at = {each["end"]: each for each in segments}, 0
    for each in points:
        need(each["position"] > at and each["position"] in ends, "arithmetic")
        at = each["position"]
        for field in ("lineage", "numerics", "origins"):
            need(each[field] == ends[at][field], "arithmetic")
        held = [blob["class"] for blob in each["blobs"]]
        need(held == ["state"] * ("whole" in classes), "arithmetic")
    need(classes == {"full"} or at == prefix["tokens"], "arithmetic")
    rows = max(
        (c["window"] - c.get("keep", 0) for c in caches if "window" in c), default=0
    )
    first = max((c.get("keep", 0) for c in caches), default=0)
    for each in segments:
        start, end = each["start"], each["end"]
        behind = [p["position"] for p in points if p["position"] >= end]
        needed = any(end > p - rows or start < first for p in behind)
        held = ["kv"] * ("full" in classes)
        held += ["window"] * ("windowed" in classes and needed)
        need([blob["class"] for blob in each["blobs"]] == held, "arithmetic")
    found: dict[str, tuple[Any, bytes, list[Any]]] = {}
    leaves = {
        name: sum(
            0 not in leaf["shape"]
            for c in caches
            for leaf in c["leaves"]
            if c["class"] == of
        )
        for name, of in CLASS_OF_BLOB.items()
    }
    placed = [(b, 1) for p in points for b in p["blobs"]]
    placed += [(b, s["end"] - s["start"]) for s in segments for b in s["blobs"]]
    pairs = {(blob["class"], count) for blob, count in placed}
    need(sum(leaves[name] for name, _ in pairs) <= 1 << 18, "limit_exceeded")
    for blob, count in placed:
        header, sizes = blob_form(caches, blob["class"], count)
        plain, stored = blob["size"], blob["encoded_size"]
        need(plain == len(header) + sum(n for n, _ in sizes), "arithmetic")
        fits = (
            stored == plain
            if blob["codec"] == "none"
            else 0 < stored < plain <= 128 * stored
        )
        need(fits, "arithmetic")
        old, known, _ = found.setdefault(blob["digest"], (blob, header, sizes))
        same = all(old[f] == blob[f] for f in ("codec", "encoded_size"))
        need(known == header and same, "arithmetic")
    need(
        sum(blob["size"] for blob, _, _ in found.values()) <= 64 * GIB, "limit_exceeded"
    )
    return list(found.values())


def check_tokens(value: Any, data: bytes) -> bytes:
    """Step 11; the last node's id is still to be told the blobs: the keys."""
    prefix, size = value["prefix"], value["block_size"]
    fits = len(data) == prefix["size"] and digest(data) == prefix["digest"]
    need(fits, "token_mismatch")
    identity = kdf("state-identity", canonical(value["identity"]))
    chain = [kdf("key-root", struct.pack("<I", size) + identity)]
    for at in range(0, len(data) // (4 * size) * 4 * size, 4 * size):
        ids = data[at : at + 4 * size]
        chain.append(kdf("key", chain[-1] + struct.pack("<I", size) + ids))
    states = {p["position"]: p["blobs"] for p in value["points"]}
    node = bytes(32)
    for each in value["segments"]:
        blocks, rest = divmod(each["end"], size)
        key = chain[blocks]
        if rest:
            ids = data[4 * blocks * size : 4 * each["end"]]
            key = kdf("key", key + struct.pack("<I", rest) + ids)
        need(key.hex() == each["key"], "token_mismatch")
        blobs = {b["class"]: b for b in [*each["blobs"], *states.get(each["end"], [])]}
        parts = [
            b"\1" + bytes.fromhex(blobs[name]["digest"][7:]) if name in blobs else b"\0"
            for name in ("kv", "window", "state")
        ]
        node = kdf("node", node + key + b"".join(parts))
    return node


def check_binding(value: Any, entries: list[Any], local: Any) -> None:
    """Step 9."""
    need(all(allows(e["models"], local["model"]) for e in entries), "untrusted_key")
    mine, theirs = local["identity"], value["identity"]
    wrong = [name for name in theirs if mine[name] != theirs[name]]
    wrong += [n for n in ("tokenizer", "block_size") if local[n] != value[n]]
    if wrong:
        versions = {"mlx_lm", "state_format"}
        code = "version_mismatch" if versions.issuperset(wrong) else "binding_mismatch"
        raise RefusedError(code, tuple(sorted(wrong)))


def verify(data: bytes, trust: bytes, given: Any) -> dict[str, Any]:
    """What is found in an artifact.

    Raises:
        RefusedError: it is wrong.
    """
    (allowed, revoked), now = trusted(trust), time(given["now"])
    file = Container(data)
    payload, kind, signatures = envelope(file.entry("envelope.json"))
    need(kind in (MANIFEST_TYPE, SEALED_TYPE), "unsupported_version")
    entries = check_signatures(payload, kind, signatures, (allowed, revoked), now)
    value = typed(load(payload), "prefix" if kind == MANIFEST_TYPE else "sealed")
    check_terms(value, entries, now, given["own_key"])
    found = {"artifact_id": digest(payload), "artifact_kind": value["artifact_kind"]}
    outside, part = (value, None) if kind == SEALED_TYPE else (None, None)
    if outside:
        private = file.entry("private.json", outside["private"]["size"])
        need(digest(private) == outside["private"]["digest"], "digest_mismatch")
        if given["recipient"] is None:
            for label, each in outside_entries(outside):
                content = file.entry(label, each["size"])
                need(digest(content) == each["digest"], "digest_mismatch")
            file.end()
            ids = [each["key_id"] for each in outside["recipients"]]
            return {**found, "messages": 2 + len(outside["blobs"]), "recipients": ids}
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(given["recipient"]))
        part = open_private(outside, private, key)
        value = part["manifest"]
    need(not revoked & set(value["origins"]), "revoked_key")
    if given["local"]:
        check_binding(value, entries, given["local"])
    forms = sums(value)
    if outside:
        counts = {len(forms), len(outside["blobs"]), len(part["keys"]["blobs"])}
        need(len(counts) == 1, "arithmetic")
        sizes = [value["prefix"]["size"], *(b["encoded_size"] for b, _, _ in forms)]
        messages = [each["size"] for _, each in outside_entries(outside)]
        need(messages == list(map(sealed_size, sizes)), "arithmetic")
        tokens = file.entry("tokens", outside["tokens"]["size"])
        need(digest(tokens) == outside["tokens"]["digest"], "digest_mismatch")
        key = bytes.fromhex(part["keys"]["tokens"])
        node = check_tokens(
            value, open_message(key, b"kvport/v1/sealed/tokens", tokens)
        )
        for form, each, hex_key in zip(
            forms, outside["blobs"], part["keys"]["blobs"], strict=True
        ):
            content = file.entry("blobs/blake3/" + each["digest"][7:], each["size"])
            key = bytes.fromhex(hex_key)
            plain = open_message(key, b"kvport/v1/sealed/blob", content)
            need(digest(content) == each["digest"], "digest_mismatch")
            check_blob(form, plain)
    else:
        node = check_tokens(value, file.entry("tokens", value["prefix"]["size"]))
        for form in forms:
            label = "blobs/blake3/" + form[0]["digest"][7:]
            check_blob(form, file.entry(label, form[0]["encoded_size"]))
    file.end()
    return {
        **found,
        "blobs": len(forms),
        "identity": kdf("state-identity", canonical(value["identity"])).hex(),
        "key": value["prefix"]["key"],
        "node": node.hex(),
        "points": [each["position"] for each in value["points"]],
        "tokens": value["prefix"]["tokens"],
    }


def outside_entries(outside: Any) -> Iterator[tuple[str, Any]]:
    yield "tokens", outside["tokens"]
    for each in outside["blobs"]:
        yield "blobs/blake3/" + each["digest"][7:], each


def judge(directory: Path) -> dict[str, Any]:
    """What a vector's `expect.json` should say."""
    data, trust, given = (
        (directory / name).read_bytes()
        for name in ("artifact.kvport", "trust.json", "given.json")
    )
    try:
        return verify(data, trust, json.loads(given))
    except RefusedError as verdict:
        return {"code": verdict.code, "fields": list(verdict.fields)}


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1])), indent=1))
