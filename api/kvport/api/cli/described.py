"""What an artifact is, from its manifest: for people, and for programs.

In: a manifest, or the public payload of a sealed artifact. Out: facts to print, or
JSON without the long lists.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvport.api.cli.output import STATE_NAMES, describe_numerics
from kvport.manifest.digests import format_digest
from kvport.manifest.identity import Lineage, fingerprint
from kvport.manifest.layout import LayerClass
from kvport.manifest.model import Manifest
from kvport.manifest.parts import Blob, Point, Segment, Tables
from kvport.manifest.sealed import SealedManifest
from kvport.manifest.terms import Terms
from kvport.manifest.timestamps import format_time
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


def summary(manifest: Manifest | SealedManifest) -> dict[str, Any]:
    """What programs want to know."""
    if isinstance(manifest, SealedManifest):
        return {"sealed": True, **_summary_of_sealed(manifest)}
    return {"sealed": False, **_summary_of_plain(manifest)}


def facts(manifest: Manifest | SealedManifest) -> Iterator[tuple[str, str]]:
    """What people want to know."""
    if isinstance(manifest, SealedManifest):
        return _facts_of_sealed(manifest)
    return _facts_of_plain(manifest)


def _summary_of_plain(manifest: Manifest) -> dict[str, Any]:
    identity = manifest.identity.to_json()
    del identity["layout"]
    data = manifest.to_json()
    kept = ("issuer", "scope", "created", "expires", "audience", "origins", "numerics")
    return {
        **{name: data[name] for name in (*kept, "block_size", "tokenizer")},
        "info": {name: text for name, text in data["info"].items() if text},
        "identity": identity,
        "layers": _layers(manifest),
        "session": data["session"] if manifest.session.id else None,
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


def _facts_of_plain(manifest: Manifest) -> Iterator[tuple[str, str]]:
    identity = manifest.identity
    yield "model files", identity.model_files
    yield "quantisation", str(identity.quant or "none")
    layers = _layers(manifest)
    kinds = {_LAYERS[LayerClass(name)]: count for name, count in layers.items()}
    yield "layers", f"{sum(kinds.values())}: {_counted(kinds)}"
    yield "engine", f"mlx-lm {identity.mlx_lm}, state format {identity.state_format}"
    blocks = f"{len(manifest.segments)} segments, blocks of {manifest.block_size}"
    if session := manifest.session.id:
        yield "session", f"{session}, number {manifest.session.sequence}"
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
    yield from _facts_of_terms(manifest.terms)


def _facts_of_terms(terms: Terms) -> Iterator[tuple[str, str]]:
    yield "scope", terms.scope
    for key_id in terms.audience:
        yield "only for", fingerprint(key_id)
    yield "created", format_time(terms.created)
    yield "expires", format_time(terms.expires)
    yield "issuer", f"{terms.issuer.name} ({fingerprint(terms.issuer.key_id)})"


def _summary_of_sealed(sealed: SealedManifest) -> dict[str, Any]:
    return {
        **sealed.terms.to_json(),
        "recipients": [wrap.recipient for wrap in sealed.recipients],
        "messages": len(sealed.blobs),
        "bytes": {"sealed": sum(blob.size for blob in sealed.blobs)},
    }


def _facts_of_sealed(sealed: SealedManifest) -> Iterator[tuple[str, str]]:
    for wrap in sealed.recipients:
        yield "sealed for", fingerprint(wrap.recipient)
    size = sum(blob.size for blob in sealed.blobs)
    yield "state", f"{len(sealed.blobs)} sealed blobs, {format_bytes(size)}"
    yield from _facts_of_terms(sealed.terms)


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
