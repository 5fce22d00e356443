"""`kvport inspect` and `kvport verify`: files, without a server, a model or mlx."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import rich_click as click

from kvport.api.cli.container import Counted, declared_size
from kvport.api.cli.errors import NoHomeError, check_readable, naming
from kvport.api.cli.options import FILE, home_option
from kvport.api.cli.output import (
    STATE_NAMES,
    describe_numerics,
    json_option,
    print_facts,
    print_json,
    say,
)
from kvport.manifest.digests import format_digest
from kvport.manifest.identity import KeyId, Lineage, fingerprint
from kvport.manifest.layout import LayerClass
from kvport.manifest.model import Manifest
from kvport.manifest.parts import Blob, Point, Segment, Tables
from kvport.manifest.timestamps import format_time
from kvport.snapshot.errors import KeyFileError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.transfer.archive import inspect_file, verify_file
from kvport.snapshot.units import format_bytes

_LAYERS: Final = {
    LayerClass.FULL: "attention",
    LayerClass.WINDOWED: "sliding-window",
    LayerClass.WHOLE: "recurrent",
}
_LINEAGES: Final = {
    Lineage.COLD: "from an empty cache",
    Lineage.DERIVED: "continued",
}


@click.command()
@click.argument("file", type=FILE)
@json_option
def inspect(file: Path, *, as_json: bool) -> None:
    """Show what a file is, without a server.

    Believes what FILE says about itself; `kvport verify` checks it.
    """
    with naming(file), _opened(file) as stream:
        counted = Counted(stream)
        inspection = inspect_file(cast("BinaryIO", counted))
        size = counted.size()
    manifest = inspection.manifest
    declared = declared_size(manifest, counted.head)
    if as_json:
        head = {
            "artifact_id": inspection.artifact_id,
            "signers": inspection.signers,
            "fingerprints": [fingerprint(signer) for signer in inspection.signers],
            "size_bytes": size,
            "declared_bytes": declared,
            "complete": size == declared,
        }
        print_json(head | _summary(manifest))
        return
    print_facts(
        [
            ("artifact", inspection.artifact_id),
            *_about(manifest),
            *(("signed by", fingerprint(signer)) for signer in inspection.signers),
        ]
    )
    if size != declared:
        difference = "cut short" if size < declared else "followed by something else"
        say(f"The file is {difference}: {size} bytes of {declared}.")
    say("Nothing of this is verified yet: see `kvport verify`.")


@click.command()
@click.argument("file", type=FILE)
@home_option
@json_option
def verify(file: Path, home: Path, *, as_json: bool) -> None:
    """Check every byte, without a server.

    Signature, trust, expiry, token ids and every blob of FILE, as an import checks
    them, under the trust list of the home. Whether it fits a model, only a server that
    holds the model can tell.
    """
    check_readable(file)
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    keyring = Keyring(home)
    with naming(file), _opened(file) as stream:
        verified = verify_file(
            stream,
            trust=keyring.load_trust(),
            now=datetime.now(UTC),
            own_key=_own_key(keyring),
        )
    if as_json:
        print_json(
            {"artifact_id": verified.artifact_id, "size_bytes": verified.size}
            | _summary(verified.manifest)
        )
        return
    print_facts(
        [
            ("verified", verified.artifact_id),
            ("size", format_bytes(verified.size)),
            *_about(verified.manifest),
        ]
    )


def _own_key(keyring: Keyring) -> KeyId | None:
    """This machine's key, which the file may be meant for; without one it is nobody."""
    try:
        return keyring.signing_key().public.key_id
    except KeyFileError:
        return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path == Path("-"):
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        yield file


def _summary(manifest: Manifest) -> dict[str, Any]:
    """What programs want to know, without the long lists."""
    identity = manifest.identity.to_json()
    del identity["layout"]
    data = manifest.to_json()
    kept = ("issuer", "scope", "created", "expires", "audience", "origins", "numerics")
    return {
        **{name: data[name] for name in (*kept, "block_size", "tokenizer")},
        "info": {name: text for name, text in data["info"].items() if text},
        "identity": identity,
        "layers": _layers(manifest),
        "tokens": manifest.prefix.tokens,
        "prefix_digest": format_digest(manifest.prefix.digest),
        "segments": len(manifest.segments),
        "points": [
            {"position": point.position, "kinds": [kind.value for kind in point.kinds]}
            for point in manifest.points
        ],
        "bytes": _sizes(manifest),
        "codecs": _codecs(manifest),
        "lineage": _lineage(manifest),
    }


def _about(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What people want to know."""
    identity = manifest.identity
    yield "model files", identity.model_files
    yield "quantisation", str(identity.quant or "none")
    layers = _layers(manifest)
    kinds = {_LAYERS[LayerClass(name)]: count for name, count in layers.items()}
    yield "layers", f"{sum(kinds.values())}: {_counted(kinds)}"
    yield "engine", f"mlx-lm {identity.mlx_lm}, state format {identity.state_format}"
    blocks = f"{len(manifest.segments)} segments, blocks of {manifest.block_size}"
    yield "tokens", f"{manifest.prefix.tokens} in {blocks}"
    sizes = {name: format_bytes(size) for name, size in _sizes(manifest).items()}
    yield (
        "state",
        ", ".join(f"{STATE_NAMES[name]} {size}" for name, size in sizes.items()),
    )
    for codec, found in _codecs(manifest).items():
        sizes_of = (format_bytes(found[name]) for name in ("bytes", "encoded_bytes"))
        yield "codec", f"{codec}: {found['blobs']} blobs, {' as '.join(sizes_of)}"
    for point in manifest.points:
        yield "restore point", f"{point.position} ({', '.join(point.kinds)})"
    lineage = _lineage(manifest)
    ways = {_LINEAGES[Lineage(name)]: count for name, count in lineage.items()}
    yield "computed", _counted(ways)
    tables = Tables.of((*manifest.segments, *manifest.points))
    for numerics in tables.numerics:
        yield "on", describe_numerics(numerics)
    for origin in tables.origins:
        yield "origin", fingerprint(origin)
    yield "scope", manifest.scope
    for key_id in manifest.audience:
        yield "only for", fingerprint(key_id)
    yield "created", format_time(manifest.created)
    yield "expires", format_time(manifest.expires)
    yield "issuer", f"{manifest.issuer.name} ({fingerprint(manifest.issuer.key_id)})"


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Plain bytes by blob class."""
    sizes: Counter[str] = Counter()
    for blob in _blobs(manifest):
        sizes[blob.blob_class.value] += blob.size
    return dict(sizes)


def _codecs(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Blobs by codec: how many, and their bytes, plain and in the file."""
    found: dict[str, Counter[str]] = {}
    for blob in _blobs(manifest):
        numbers = {
            "blobs": 1,
            "bytes": blob.size,
            "encoded_bytes": blob.encoded_size,
        }
        found.setdefault(blob.codec.value, Counter()).update(numbers)
    return {codec: dict(numbers) for codec, numbers in sorted(found.items())}


def _blobs(manifest: Manifest) -> Iterable[Blob]:
    """Each blob once: one that occurs twice is in the file once."""
    parts: tuple[Segment | Point, ...] = (*manifest.segments, *manifest.points)
    return {blob.digest: blob for part in parts for blob in part.blobs}.values()


def _lineage(manifest: Manifest) -> dict[str, int]:
    """Tokens by lineage."""
    tokens: Counter[str] = Counter()
    for segment in manifest.segments:
        tokens[segment.provenance.lineage.value] += segment.end - segment.start
    return dict(tokens)


def _layers(manifest: Manifest) -> dict[str, int]:
    """Cache objects by layer class."""
    caches = manifest.identity.layout.caches
    return dict(Counter(cache.layer_class.value for cache in caches))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
