"""JSON values with a fault or two, and the documents that they are made from."""

import copy
import json
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import strategies as st

from kvport.manifest.canonical import strict_loads
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import FormatError, UnsupportedVersionError
from kvport.manifest.identity import StateIdentity
from kvport.manifest.model import Manifest
from kvport.manifest.sealed import PrivatePart, SealedManifest
from kvport.manifest.trust import TrustDocument, TrustList
from tests.manifest.builder import ManifestBuilder
from tests.vectors.cases_valid import ODD
from tests.vectors.making import BASE, WIDE
from tests.vectors.sealed_making import SEALED
from tests.vectors.trust_making import DOCUMENT, FULL

_SCALARS = st.sampled_from(
    [
        -1, 0, 1, 2, 255, 1024, 1025, 8193, 16384, 2**20, 2**20 + 1, 2**30, 2**30 + 1,
        2**31 - 1, 2**31, 2**53 - 1, 2**53, True, False, None, 1.0, 0.5, "", "*", "a",
        "A", "a\n", "\n", " ", "\0", "\x7f", "\u00a0", "\u00ad", "\u2028", "\u0378",
        "\u00e9" * 257, "x" * 513, "\U0001f5a5", "kv", "whole", "state", "prefix",
        "sealed", "export", "trust", "none", "cold", "fork", "F16", "0", "0.1", "00",
        "k", "2026-02-30T00:00:00Z", "2026-01-01T24:00:00Z",
        "0000-01-01T00:00:00Z",
        "2026-01-01T00:00:60Z", "9999-12-31T23:59:59Z", "0" * 64, "A" * 64,
        "blake3:" + "0" * 64, "ed25519:" + "0" * 64, "x25519:" + "0" * 64, "0" * 32,
        "AAAA", "AA==", "AB==", "AA=", "A===", "-_==",
    ]
)  # fmt: skip
_VALUES = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["a", "A", "b_1", "1", ""]), _SCALARS, max_size=2),
    st.just([[[[[[[[1]]]]]]]]),
    st.just({"a": {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}}),
)


@st.composite
def mutants(draw: st.DrawFn, value: Any, faults: int = 2) -> Any:
    """The value with up to so many changes, at places that are drawn."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, faults))):
        above, place = draw(st.sampled_from(_places(value)))
        pool = [part[name] for part, name in _places(value)]
        new = copy.deepcopy(draw(st.one_of(_VALUES, st.sampled_from(pool))))
        match draw(st.sampled_from(["put", "put", "put", "drop", "add", "nudge"])):
            case "put":
                above[place] = new
            case "drop":
                del above[place]
            case "add" if isinstance(above, list):
                again = copy.deepcopy(above[place])
                above.insert(place, draw(st.sampled_from([again, new])))
            case "add":
                above[draw(st.sampled_from(["more", "a", "kind", *above]))] = new
            case _:
                above[place] = copy.deepcopy(draw(_nudged(above[place])))
        if not _places(value):
            break
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in the value, with each of its keys or indexes."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        names = list(value) if isinstance(value, dict) else range(len(value))
        for name in names:
            found.append((value, name))
            found += _places(value[name])
    return found


def _nudged(value: Any) -> st.SearchStrategy[Any]:
    """Something near."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([value - 1, value + 1, float(value), str(value)])
    if isinstance(value, str):
        near = [value[:-1], value + "0", value + "\n", value.upper(), " " + value]
        return st.sampled_from(near)
    if isinstance(value, list):
        return st.sampled_from([value[::-1], value[:-1], value * 2, value + value[:1]])
    return st.just(value)


def spelled(value: Any) -> bytes:
    """A value's bytes: canonical if the value can be."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


@attrs.frozen
class Document:
    """A kind of document: examples of it, and what decodes it or raises."""

    schema: str
    examples: tuple[Any, ...]
    decode: Callable[[Any], object]


def _envelope(value: Any) -> object:
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    opened = open_envelope(data.encode("utf-8", "surrogatepass"))
    if opened.payload_type not in list(PayloadType):
        raise UnsupportedVersionError("an envelope with another type of payload")
    return opened


def _identity(value: Any) -> object:
    # In a manifest it is one level further in.
    data = strict_loads(spelled({"identity": value}))
    if not isinstance(data, dict):
        raise FormatError("not an object")
    return StateIdentity.from_json(data["identity"])


def _json(data: bytes, depth: int = 8) -> Any:
    return strict_loads(data, depth=depth)


_ODD = ManifestBuilder(layout=ODD)

DOCUMENTS = (
    Document(
        "manifest",
        (WIDE.payload(), BASE.payload(), _ODD.payload()),
        lambda value: Manifest.from_json(strict_loads(spelled(value))),
    ),
    Document("identity", (_ODD.identity.to_json(),), _identity),
    Document(
        "sealed",
        (_json(SEALED.manifest().encode()),),
        lambda value: SealedManifest.from_json(strict_loads(spelled(value))),
    ),
    Document(
        "private",
        (_json(SEALED.part().encode(), 9),),
        lambda value: PrivatePart.decode(spelled(value)),
    ),
    Document(
        "trust",
        (_json(FULL.to_json()), _json(BASE.trust(scopes=frozenset({"a"})).to_json())),
        lambda value: TrustList.from_json(spelled(value)),
    ),
    Document(
        "trust-document",
        (_json(DOCUMENT.encode()),),
        lambda value: TrustDocument.decode(spelled(value)),
    ),
    Document("envelope", (json.loads(BASE.signed()),), _envelope),
)
