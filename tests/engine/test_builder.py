import json
import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load, load_tokenizer

from kvport.snapshot.engine.builder import (
    ARCHITECTURES,
    KNOWN_ARCHITECTURES,
    build_model,
)
from kvport.snapshot.engine.builder.tokenizer import (
    ALPHABET,
    IM_END,
    SPECIAL_TOKENS,
    UNKNOWN,
    VOCABULARY_SIZE,
    special_token_id,
)
from kvport.snapshot.errors import ModelBuildError

WINDOWED = {
    "baichuan_m1", "cohere2", "exaone4", "exaone_moe", "gemma3_text", "gemma3n",
    "gemma4_text", "gpt_oss", "iquestloopcoder", "laguna", "llama_swa", "mimo_v2_flash",
    "ministral3", "olmo3", "recurrent_gemma", "step3p5",
}  # fmt: skip
WHOLE = {
    "baichuan_m1", "bailing_moe_linear", "falcon_h1", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2",
    "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_next", "recurrent_gemma",
    "rwkv7",
}  # fmt: skip
WITHOUT_FULL = {"mamba", "mamba2", "recurrent_gemma", "rwkv7"}

NEEDS_LAYERS = [name for name, entry in ARCHITECTURES.items() if entry.least > 1]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def greedy(model, prompt: list[int], count: int, cache=None) -> list[int]:
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=cache or make_prompt_cache(model),
    )
    return [int(token) for token, _ in steps]


def flat(caches) -> list:
    return [
        part
        for cache in caches
        for part in (flat(cache.caches) if hasattr(cache, "caches") else [cache])
    ]


@pytest.mark.parametrize("arch", KNOWN_ARCHITECTURES)
def test_every_architecture_loads_and_says_something(arch, tmp_path):
    build_model(arch, tmp_path / "model")
    model, tokenizer = load(str(tmp_path / "model"))

    messages = [{"role": "user", "content": "What is carried here, and why?" * 3}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = make_prompt_cache(model)
    tokens = greedy(model, prompt, 40, cache)

    assert len(set(tokens)) >= 8
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens
    kinds = {type(c) for c in flat(cache)}
    assert (RotatingKVCache in kinds) == (arch in WINDOWED)
    assert (ArraysCache in kinds) == (arch in WHOLE)
    assert (KVCache in kinds) == (arch not in WITHOUT_FULL)
    windows = [c.max_size for c in flat(cache) if isinstance(c, RotatingKVCache)]
    assert all(48 <= window <= 64 for window in windows)


@pytest.mark.parametrize("arch", KNOWN_ARCHITECTURES)
def test_same_arguments_give_the_same_bytes(arch, tmp_path):
    mx.random.seed(1)
    build_model(arch, tmp_path / "a", seed=7, layers=4)
    mx.random.seed(2)
    build_model(arch, tmp_path / "b", seed=7, layers=4)
    build_model(arch, tmp_path / "c", seed=8, layers=4)

    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}


def test_a_name_of_ours_is_a_known_model_type_in_the_configuration(tmp_path):
    build_model("llama_swa", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert set(config["layer_types"]) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize("arch", NEEDS_LAYERS)
def test_the_fewest_layers_still_run(arch, tmp_path):
    least = ARCHITECTURES[arch].least
    with pytest.raises(ModelBuildError, match=f"layers must be from {least} to 256"):
        build_model(arch, tmp_path / "model", layers=least - 1)
    build_model(arch, tmp_path / "model", layers=least)
    model, _ = load(str(tmp_path / "model"))
    assert greedy(model, [40, 41, 42], 1)


def test_a_model_of_48_layers_has_36_recurrent_and_12_attention_layers(tmp_path):
    build_model("qwen3_5", tmp_path / "model", layers=48)
    model, _ = load(str(tmp_path / "model"))
    cache = make_prompt_cache(model)
    tokens = greedy(model, list(range(20, 40)), 16, cache)

    kinds = [type(c).__name__ for c in cache]
    assert (kinds.count("ArraysCache"), kinds.count("KVCache")) == (36, 12)
    assert len(set(tokens)) >= 8


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_logits_stay_the_same_size_over_a_thousand_tokens(arch, tmp_path):
    build_model(arch, tmp_path / "model")
    model, _ = load(str(tmp_path / "model"))
    cache = make_prompt_cache(model)
    ids = random.Random(3).choices(range(VOCABULARY_SIZE), k=1024)
    for start in range(0, 1024, 256):
        logits = model(mx.array([ids[start : start + 256]]), cache=cache)
        deviation = float(mx.std(logits, axis=-1).mean())
        assert 1.0 < deviation < 10.0


@pytest.mark.parametrize(
    ("size", "layers"), [(48, None), (1024, None), (1536, 3), (4096, 1), (81920, 4)]
)
def test_a_llama_has_the_kv_bytes_per_token_that_were_asked_for(size, layers, tmp_path):
    build_model("llama", tmp_path / "model", layers=layers, kv_bytes_per_token=size)
    model, _ = load(str(tmp_path / "model"))
    cache = make_prompt_cache(model)
    model(mx.array([[40, 41, 42]]), cache=cache)

    rows = [leaf[..., : c.offset, :] for c in cache for leaf in (c.keys, c.values)]
    assert sum(leaf.nbytes for leaf in rows) == 3 * size
    assert layers in (None, len(cache))


@pytest.mark.parametrize(
    ("size", "layers", "nearest"),
    [
        (0, None, 16),
        (-16, None, 16),
        (100, None, 96),
        (1000, 3, 1008),
        # A prime number of pairs: neither one head nor so many are sensible.
        (16 * 65537, None, 16 * 65536),
        (2**30, 1, 2**20),
    ],
)
def test_kv_bytes_out_of_reach_name_the_nearest(size, layers, nearest, tmp_path):
    with pytest.raises(ModelBuildError, match=rf"nearest has {nearest}$"):
        build_model("llama", tmp_path / "m", layers=layers, kv_bytes_per_token=size)
    build_model("llama", tmp_path / "m", layers=layers, kv_bytes_per_token=nearest)


@pytest.mark.parametrize(
    ("arch", "arguments", "message"),
    [
        ("no_such", {}, "known are llama, qwen3"),
        ("llama", {"template": "no_such"}, "known are chatml, thinking"),
        ("llama", {"seed": -1}, "seed"),
        ("llama", {"seed": 2**64}, "seed"),
        ("llama", {"layers": 0}, "layers must be from 1 to 256"),
        ("llama", {"layers": 257}, "layers must be from 1 to 256"),
        ("mamba2", {"kv_bytes_per_token": 1024}, "only llama"),
    ],
)
def test_arguments_out_of_range_are_refused(arch, arguments, message, tmp_path):
    with pytest.raises(ModelBuildError, match=message) as caught:
        build_model(arch, tmp_path / "model", **arguments)
    assert caught.value.code == "model_build"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_never_written_to(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ModelBuildError, match="not empty"):
        build_model("llama", tmp_path / "model")
    assert [file.name for file in tmp_path.rglob("*")] == ["model", "notes.txt"]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    build_model("llama", tmp_path / "model")
    assert sorted(contents(tmp_path / "model")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def tokenizer(request, tmp_path_factory) -> TokenizerWrapper:
    # transformers replaces qwen3_5's pipeline by one of its own.
    directory = tmp_path_factory.mktemp("models") / "model"
    build_model(request.param, directory)
    return load_tokenizer(directory)


def test_each_id_is_one_character_and_back(tokenizer):
    count = len(ALPHABET) + 1
    texts = [tokenizer.decode([i]) for i in range(VOCABULARY_SIZE)]
    assert texts == [*ALPHABET, UNKNOWN, *SPECIAL_TOKENS]
    assert len(set(texts)) == VOCABULARY_SIZE == len(tokenizer)
    assert all(len(text) == 1 for text in texts[:count])
    assert all(text.isprintable() or text == "\n" for text in texts)
    assert len(ALPHABET) > 256


def test_any_sequence_of_ids_survives_as_text(tokenizer):
    generator = random.Random(11)
    for _ in range(50):
        ids = generator.choices(range(VOCABULARY_SIZE), k=200)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_any_text_over_the_alphabet_survives(tokenizer):
    generator = random.Random(12)
    texts = ["", " ", "  two  ", "\n\n", " .\n,", "it's", "a\n b \n\n c ", "<|im_end>"]
    texts += ["".join(generator.choices(ALPHABET, k=300)) for _ in range(20)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_streamed_text_is_the_decoded_text(tokenizer):
    ids = random.Random(13).choices(range(VOCABULARY_SIZE), k=300)
    detokenizer = tokenizer.detokenizer
    pieces = []
    for token in ids:
        detokenizer.add_token(token)
        pieces.append(detokenizer.last_segment)
    detokenizer.finalize()
    pieces.append(detokenizer.last_segment)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_unknown_characters_have_a_printable_mark(tmp_path):
    build_model("llama", tmp_path / "model", layers=1)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("a日本b")) == f"a{UNKNOWN}{UNKNOWN}b"


def test_generation_ends_at_im_end(tokenizer):
    assert tokenizer.eos_token_ids == {special_token_id(IM_END)}
    assert tokenizer.encode(IM_END) == [special_token_id(IM_END)]


def render(tokenizer, messages, **kwargs) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **kwargs)


QUESTION = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}]
REPLY = "first I think\n</think>\n\nthen I say"


def next_turn(reply: str) -> list[dict[str, str]]:
    return [
        *QUESTION,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And?"},
    ]


def test_chatml_keeps_the_reply_so_the_next_turn_continues_it(tokenizer):
    first = render(tokenizer, QUESTION)
    continued = first + tokenizer.encode(REPLY + IM_END)
    assert render(tokenizer, next_turn(REPLY))[: len(continued)] == continued


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> TokenizerWrapper:
    directory = tmp_path_factory.mktemp("models") / "model"
    build_model("qwen3", directory, layers=1, template="thinking")
    return load_tokenizer(directory)


def test_thinking_drops_reasoning_so_turns_part_inside_the_prompt(thinking):
    first = render(thinking, QUESTION)
    second = render(thinking, next_turn(REPLY))
    common = next(
        i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b
    )
    assert thinking.decode(first[common:]) == "<think>\n"
    text = thinking.decode(second)
    assert "first I think" not in text
    assert "<|im_start|>assistant\nthen I say<|im_end|>\n" in text


def test_thinking_keeps_reasoning_after_the_last_user_turn(thinking):
    messages = [*QUESTION, {"role": "assistant", "content": REPLY}]
    text = thinking.apply_chat_template(messages, tokenize=False)
    assert text.endswith(f"assistant\n{REPLY}<|im_end|>\n")


def test_thinking_can_be_switched_off_for_a_request(thinking):
    text = thinking.decode(render(thinking, QUESTION, enable_thinking=False))
    assert text.endswith("<|im_start|>assistant\n")


def test_tools_are_part_of_the_prompt(tokenizer, thinking):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    for each in (tokenizer, thinking):
        text = each.decode(render(each, QUESTION, tools=tools))
        assert "look_up" in text
        assert text.endswith(each.decode(render(each, QUESTION)))


def test_the_template_is_stored_in_tokenizer_config_only(tmp_path):
    build_model("llama", tmp_path / "chatml")
    build_model("llama", tmp_path / "thinking", template="thinking")
    a, b = contents(tmp_path / "chatml"), contents(tmp_path / "thinking")
    assert {name for name in a if a[name] != b[name]} == {"tokenizer_config.json"}
    configs = [json.loads(files["tokenizer_config.json"]) for files in (a, b)]
    for config in configs:
        del config["chat_template"]
    assert configs[0] == configs[1]
