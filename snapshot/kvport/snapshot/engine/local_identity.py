"""The identity of what runs here: model files, tokenizer, numerics.

Digests cover names, sizes and contents of files, never the directory's name or path. A
file's digest is remembered by its inode, size and times, so that a start does not read
hundreds of gigabytes again; a replaced file has other times.
"""

import json
import os
import platform
import re
import struct
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from blake3 import blake3

from kvport.manifest.canonical import canonical_dumps
from kvport.manifest.digests import derive, format_digest
from kvport.manifest.domains import Domain
from kvport.manifest.identity import Numerics, StateIdentity
from kvport.manifest.layout import StateLayout
from kvport.snapshot.remembered import Remembered
from kvport.snapshot.state.kv_form import KvForm

_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_WEIGHTS: Final = "model*.safetensors"
# generation_config.json is loaded too, but only for the end tokens: no state depends on
# it.
_GEOMETRY: Final = ("config.json", "hf_quant_config.json")
_TOKENIZER: Final = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt",
    "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip


class FileDigests:
    """Digests of model files, remembered by the home."""

    def __init__(self, path: Path) -> None:
        self._known = Remembered(path)

    def digest(self, path: Path) -> bytes:
        """BLAKE3 of the file's contents, 32 bytes."""
        before = _fingerprint(path)
        if (found := self._known.get(before)) is not None and _HEX.fullmatch(found):
            return bytes.fromhex(found)
        digest = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        if _fingerprint(path) == before:
            self._known.put(before, digest.hex())
        return digest


def _fingerprint(path: Path) -> str:
    found = path.stat()
    return ":".join(
        map(
            str,
            (
                found.st_dev, found.st_ino, found.st_size,
                found.st_mtime_ns, found.st_ctime_ns,
            ),
        )
    )  # fmt: skip


def state_identity(
    directory: Path,
    config: Mapping[str, Any],
    layout: StateLayout,
    files: FileDigests,
    *,
    kv_form: KvForm | None = None,
) -> StateIdentity:
    """State identity of a model that mlx-lm loaded from `directory`.

    `kv_form` is that of keys and values, if it is not the model's own.
    """
    weights = sorted(directory.glob(_WEIGHTS))
    geometry = [directory / name for name in _GEOMETRY if (directory / name).exists()]
    return StateIdentity(
        model_files=_digest_files(Domain.MODEL_FILES, [*geometry, *weights], files),
        adapters=(),
        quant=_quantisation(config.get("quantization")),
        kv=kv_form.name if kv_form else "model",
        layout=layout,
        mlx_lm=version("mlx-lm"),
    )


def tokenizer_digest(directory: Path, files: FileDigests) -> str:
    """Digest of the files that turn text into token ids.

    tokenizer_config.json counts without its chat template: a template changes which
    tokens a conversation has, not what they mean.
    """
    present = [directory / n for n in _TOKENIZER if (directory / n).exists()]
    parts = [_digest_files(Domain.TOKENIZER_FILES, present, files).encode()]
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
    except FileNotFoundError:
        config = {}
    config.pop("chat_template", None)
    parts.append(json.dumps(config, sort_keys=True).encode())
    return format_digest(derive(Domain.TOKENIZER_FILES, _framed(parts)))


def _digest_files(domain: Domain, paths: list[Path], files: FileDigests) -> str:
    parts: list[bytes] = []
    for path in sorted(paths, key=lambda p: p.name):
        parts += [
            path.name.encode(),
            struct.pack("<Q", path.stat().st_size),
            files.digest(path),
        ]
    return format_digest(derive(domain, _framed(parts)))


def _framed(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _quantisation(found: object) -> dict[str, Any]:
    """A config's weight quantisation in canonical JSON's terms, for people to read.

    Layers of their own are listed, since their names are no canonical keys; floats
    become strings. The config itself is bound byte for byte by the model's files.
    """
    if not isinstance(found, dict):
        return {}
    general = {k: _plain(v) for k, v in found.items() if not isinstance(v, dict)}
    layers = [
        {"layer": name, **{k: _plain(v) for k, v in value.items()}}
        for name, value in sorted(found.items())
        if isinstance(value, dict)
    ]
    general = {k: v for k, v in general.items() if re.fullmatch(r"[a-z][a-z0-9_]*", k)}
    if not layers:
        return general
    digest = format_digest(
        derive(Domain.MODEL_FILES, canonical_dumps({"layers": layers}))
    )
    return {**general, "layers": len(layers), "layers_digest": digest}


def _plain(value: object) -> str | int | bool:
    return value if isinstance(value, (str, int)) else str(value)


def numerics(chunk: int) -> Numerics:
    """What determines the last bits on this machine."""
    on_gpu = mx.default_device().type == mx.gpu
    family = str(mx.device_info().get("architecture", "")) if on_gpu else ""
    blas, threads = ("", 0) if on_gpu else _blas()
    return Numerics(
        mlx=version("mlx"),
        device="gpu" if on_gpu else "cpu",
        gpu_family=family,
        blas=blas,
        blas_threads=threads,
        chunk=chunk,
        compile="MLX_DISABLE_COMPILE" not in os.environ,
    )


def _blas() -> tuple[str, int]:
    """The BLAS library that mlx's CPU backend runs on, and its threads."""
    if platform.system() == "Darwin":
        return f"accelerate-{platform.mac_ver()[0]}", 0
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    loaded = re.findall(r"/(lib(?:openblas|mkl_rt|blis|blas)[^/\s]*\.so[^/\s]*)", maps)
    # A preloaded library comes before the one that mlx's wheel brings.
    ranked = sorted(set(loaded), key=lambda name: (name.startswith("libblas"), name))
    name = ranked[0] if ranked else "unknown"
    if name.startswith("libblas"):
        return name, 1  # the reference implementation has no threads
    limit = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return name, int(limit) if limit and limit.isdigit() else os.cpu_count() or 1
