"""`kvport convert`: both ways, without a server; half a file is never left."""

import importlib
import json
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load

cache_prompt = importlib.import_module("mlx_lm.cache_prompt")
generate = importlib.import_module("mlx_lm.generate")  # mlx_lm has a function so named

TOKENS = [(7 * i) % 290 + 1 for i in range(300)]


@pytest.fixture
def made(cli, model_dir, tmp_path):
    """(model, its caches, their file, a file with their tokens), and a home."""
    cli.json("keys", "init")
    directory = model_dir("llama")
    module, _ = load(str(directory))
    caches = make_prompt_cache(module)
    mx.eval(module(mx.array([TOKENS]), cache=caches))
    path, tokens = tmp_path / "cache.safetensors", tmp_path / "tokens"
    save_prompt_cache(str(path), caches)
    tokens.write_text(json.dumps([*TOKENS, 9]))
    return module, caches, path, tokens


def test_a_prompt_cache_goes_to_an_artifact_and_back(cli, model_dir, made, tmp_path):
    module, caches, path, tokens = made
    model = ["--model", str(model_dir("llama"))]
    artifact, back = tmp_path / "a.kvport", tmp_path / "b.any"
    there = ["convert", str(path), *model, "-o", str(artifact)]
    found = cli.json(*there, "--tokens-file", str(tokens))
    assert (found["tokens"], found["model"]) == (300, "llama")
    assert cli.json("verify", str(artifact))["artifact_id"] == found["artifact_id"]
    assert artifact.stat().st_mode & 0o777 == 0o600

    result = cli.run("convert", str(artifact), *model, "-o", str(back))
    assert result.exit_code == 0, result.output
    assert "converted the state of 300 tokens" in result.stdout
    loaded, metadata = load_prompt_cache(_named(back), return_metadata=True)
    assert metadata["model"] == str(model_dir("llama"))
    assert json.loads(metadata["tokenizer_config"]) == {}
    step = mx.array([[5, 6]])
    assert mx.array_equal(module(step, cache=loaded), module(step, cache=caches)).item()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_the_form_of_an_earlier_mlx_lm(cli, model_dir, made, tmp_path):
    _, _, path, tokens = made
    artifact, older, again = (str(tmp_path / name) for name in ("a", "older", "again"))
    there = ["--model", str(model_dir("llama")), "--tokens-file", str(tokens)]
    cli.json("convert", str(path), *there, "-o", artifact)
    cli.json("convert", artifact, *there[:2], "--form", "0.31", "-o", older)
    assert b'"2.0":"KVCache"' in (tmp_path / "older").read_bytes()
    assert cli.json("convert", older, *there, "-o", again)["tokens"] == 300


def test_a_text_is_the_prompt_of_its_first_tokens(cli, model_dir, tmp_path):
    cli.json("keys", "init")
    module, tokenizer = load(str(model_dir("llama")))
    text = "once upon a time"
    caches = make_prompt_cache(module)
    mx.eval(module(mx.array([tokenizer.encode(text)]), cache=caches))
    path, file = tmp_path / "cache.safetensors", tmp_path / "text"
    save_prompt_cache(str(path), caches)
    file.write_text(text + " and longer")
    found = cli.json(
        "convert", str(path), "--model", str(model_dir("llama")),
        "--prompt-file", str(file), "-o", str(tmp_path / "a.kvport"),
    )  # fmt: skip
    assert found["tokens"] == len(tokenizer.encode(text))


@pytest.mark.parametrize("arch", ["llama", "mamba2"])
def test_mlx_lms_own_commands_write_and_continue_such_files(
    cli, model_dir, tmp_path, request, arch
):
    """Caches that count their tokens, and such that do not."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    capsys = request.getfixturevalue("capsys")
    cli.json("keys", "init")
    directory = str(model_dir(arch))
    path, chat = tmp_path / "cache.safetensors", tmp_path / "chat"
    named = ["--model", directory, "--prompt-cache-file"]
    command(monkeypatch, cache_prompt, *named, str(path), "--prompt", "once upon")
    chat.write_text(json.dumps([{"role": "user", "content": "once upon"}]))
    artifact, back = tmp_path / "a.kvport", tmp_path / "b.safetensors"
    there = ["--messages-file", str(chat), "-o", str(artifact)]
    tokens = cli.json("convert", str(path), *named[:2], *there)["tokens"]
    offset = getattr(load_prompt_cache(str(path))[0], "offset", None)
    assert tokens == (offset or tokens) > 0
    cli.json("convert", str(artifact), *named[:2], "-o", str(back))

    def continued(file):
        capsys.readouterr()
        rest = [str(file), "--prompt", " a time", "--max-tokens", "8"]
        command(monkeypatch, generate, *named, *rest, "--verbose", "False")
        return capsys.readouterr().out

    assert continued(back) == continued(path) != ""


def command(monkeypatch, module, *args):
    """Run a command of mlx-lm in this process."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm", *args])
    module.main()


@pytest.mark.parametrize("damage", ["cut", "foreign", "longer"])
def test_nothing_is_written_of_a_file_that_is_refused(
    cli, model_dir, made, tmp_path, damage
):
    _, _, path, tokens = made
    code = "prompt_cache"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "foreign":
        path.write_bytes(b"anything")
    else:
        tokens.write_text("[1, 2, 3]")
        code = "prompt_cache_mismatch"
    output = tmp_path / "a.kvport"
    output.write_bytes(b"before")
    before = sorted(tmp_path.iterdir())
    args = ["--model", str(model_dir("llama")), "--tokens-file", str(tokens)]
    assert cli.refusal("convert", str(path), *args, "-o", str(output)) == code
    assert output.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == before


def test_a_prompt_goes_with_a_prompt_cache_and_with_nothing_else(
    cli, model_dir, made, tmp_path
):
    _, _, path, tokens = made
    rest = ["--model", str(model_dir("llama")), "-o", str(tmp_path / "a.kvport")]
    assert cli.run("convert", str(path), *rest).exit_code == 2
    cli.json("convert", str(path), *rest, "--tokens-file", str(tokens))
    artifact = str(tmp_path / "a.kvport")
    result = cli.run("convert", artifact, *rest, "--tokens-file", str(tokens))
    assert result.exit_code == 2
    assert "names its own prompt" in result.stderr


def test_what_is_not_there_is_named(cli, model_dir, tmp_path):
    model = ["--model", str(model_dir("llama"))]
    output = ["-o", str(tmp_path / "x")]
    assert cli.refusal("convert", str(tmp_path / "no"), *model, *output) == "local_file"
    there = tmp_path / "there"
    there.write_bytes(b"")
    assert cli.refusal("convert", str(there), *model, *output) == "no_home"
    cli.json("keys", "init")
    assert cli.refusal("convert", str(tmp_path / "no"), *model, *output) == "local_file"
    path = tmp_path / "file"
    path.write_bytes(b"")
    nowhere = ["-o", str(tmp_path / "no" / "x")]
    assert cli.refusal("convert", str(path), *model, *nowhere) == "local_file"


def _named(path):
    """mlx tells a file's form by its name."""
    named = path.with_suffix(".safetensors")
    path.rename(named)
    return str(named)
