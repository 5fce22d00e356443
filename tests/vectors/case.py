"""One vector: an artifact, what its verifier is given, and what must come of it.

In the directory of a vector:

    artifact.kvport   the container's bytes
    trust.json        the trust list, as it is in a home
    given.json        the time, the verifier's own key id or null, its recipient key (32
                      private bytes, hex) or null, and the model that the artifact must
                      fit, or null
    expect.json       an invalid one: the code, and what it breaks; a valid one: its id,
                      and what is found in it
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from kvport.manifest.canonical import strict_loads
from kvport.manifest.digests import format_digest, parse_digest
from kvport.manifest.identity import KeyId, StateIdentity
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.signed import Local
from kvport.manifest.timestamps import format_time, parse_time
from kvport.manifest.trust import TrustList
from tests.manifest.builder import NOW

ROOT = Path(__file__).parent / "v1"


@attrs.frozen(kw_only=True)
class Case:
    """A vector's content; `expect` of a valid one is found when it is written."""

    name: str
    container: bytes
    trust: bytes
    now: datetime = NOW
    own_key: KeyId | None = None
    recipient: RecipientKey | None = None
    local: Local | None
    expect: dict[str, Any]

    @property
    def is_valid(self) -> bool:
        return "code" not in self.expect

    def given(self) -> dict[str, Any]:
        return {
            "local": None if self.local is None else local_json(self.local),
            "now": format_time(self.now),
            "own_key": self.own_key,
            "recipient": self.recipient and self.recipient.to_bytes().hex(),
        }

    def files(self) -> dict[str, bytes]:
        """Content by name."""
        return {
            "artifact.kvport": self.container,
            "expect.json": document(self.expect),
            "given.json": document(self.given()),
            "trust.json": self.trust,
        }

    def directory(self) -> Path:
        return ROOT / ("valid" if self.is_valid else "invalid") / self.name


def read(directory: Path) -> Case:
    """A vector from its files."""
    given = json.loads((directory / "given.json").read_bytes())
    recipient = given["recipient"]
    local = given["local"]
    return Case(
        name=directory.name,
        container=(directory / "artifact.kvport").read_bytes(),
        trust=(directory / "trust.json").read_bytes(),
        now=parse_time(given["now"]),
        own_key=given["own_key"],
        recipient=recipient and RecipientKey.from_bytes(bytes.fromhex(recipient)),
        local=local and _local(local),
        expect=json.loads((directory / "expect.json").read_bytes()),
    )


def directories() -> list[Path]:
    """Those of all vectors."""
    return sorted(path.parent for path in ROOT.glob("*/*/expect.json"))


def document(value: object) -> bytes:
    """A file for people, too."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def trust_value(trust: TrustList) -> dict[str, Any]:
    """A trust list's JSON, to be changed."""
    value = strict_loads(trust.to_json())
    assert isinstance(value, dict)
    return value


def local_json(local: Local) -> dict[str, Any]:
    return {
        "block_size": local.block_size,
        "identity": local.identity.to_json(),
        "model": local.model,
        "tokenizer": format_digest(local.tokenizer),
    }


def _local(value: dict[str, Any]) -> Local:
    return Local(
        identity=StateIdentity.from_json(value["identity"]),
        tokenizer=parse_digest(value["tokenizer"]),
        block_size=value["block_size"],
        model=value["model"],
    )
