"""`kvport models build` and `kvport selfcheck`: what needs mlx but no server."""

import json


def test_build_writes_a_model_that_selfcheck_passes(cli, tmp_path):
    directory = tmp_path / "tiny"
    built = cli.json("models", "build", "llama", str(directory), "--layers", "1")
    assert built == {"model": "llama", "directory": str(directory)}
    args = ["--model", str(directory), "--tokens", "600", "--policy", "exact"]
    report = cli.json("selfcheck", *args)
    assert report.pop("duration_s") > 0
    assert report.pop("numerics")["chunk"] == 512
    assert report == {
        "model": "tiny",
        "policy": "exact",
        "tokens": 600,
        "restored_tokens": 512,
        "expected_tokens": 512,
        "max_diff_to_hot": 0.0,
        "max_diff_to_cold": 0.0,
        "passed": True,
    }


def test_selfcheck_leaves_nothing_behind(cli, tmp_path, monkeypatch, model_dir):
    work = tmp_path / "tmp"
    work.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(work))
    result = cli.run("selfcheck", "--model", str(model_dir("llama")), "--tokens", "40")
    assert result.exit_code == 0, result.output
    assert "39 of 40 tokens, expected 39" in result.stdout
    assert not list(work.iterdir())


def test_selfcheck_takes_a_prompt_of_four_chunks_unless_told(cli, model_dir):
    args = ["selfcheck", "--model", str(model_dir("llama")), "--chunk", "256"]
    assert cli.json(*args)["tokens"] == 4 * 256 + 1


def test_selfcheck_of_too_short_a_prompt_is_refused(cli, model_dir):
    args = ["--model", str(model_dir("llama")), "--tokens", "100", "--policy", "exact"]
    assert cli.refusal("selfcheck", *args) == "setting"


def test_build_refuses_what_it_cannot_build(cli, tmp_path):
    directory = str(tmp_path / "x")
    assert cli.refusal("models", "build", "bogus", directory) == "model_build"
    args = ["qwen3", directory, "--kv-bytes-per-token", "4096"]
    assert cli.refusal("models", "build", *args) == "model_build"


def test_build_sizes_the_cache_of_a_llama(cli, tmp_path):
    directory = tmp_path / "sized"
    args = ["llama", str(directory), "--kv-bytes-per-token", "4096", "--layers", "2"]
    cli.json("models", "build", *args)
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    assert config["num_hidden_layers"] * heads * 2 * 4 == 4096


def test_architectures_lists_every_kind(cli):
    names = cli.json("models", "architectures")["architectures"]
    assert {"llama", "qwen3_5", "gemma3_text"} <= set(names)
    assert "gemma3_text" in cli.run("models", "architectures").stdout
