"""`kvport models build` and `kvport selfcheck`: what needs mlx but no server."""

import json

from kvport.api.architectures_page import COLUMNS
from kvport.snapshot.engine import restore
from kvport.snapshot.engine.selfcheck import CASE_NAMES, architectures
from kvport.snapshot.errors import UnsupportedModelError


def test_build_writes_a_model_that_selfcheck_passes(cli, tmp_path):
    directory = tmp_path / "tiny"
    built = cli.json("models", "build", "llama", str(directory), "--layers", "1")
    assert built == {"model": "llama", "directory": str(directory)}
    args = ["--model", str(directory), "--tokens", "600", "--policy", "exact"]
    report = cli.json("selfcheck", *args)
    assert report.pop("duration_s") > 0
    assert report.pop("numerics")["chunk"] == 512
    figures = {
        "restored_tokens": 512,
        "expected_tokens": 512,
        "max_diff_to_hot": 0.0,
        "max_diff_to_cold": 0.0,
        "passed": True,
    }
    cases = report.pop("cases")
    assert [case.pop("case") for case in cases] == list(CASE_NAMES)
    assert all(case == figures | {"policy": "exact"} for case in cases)
    assert report == figures | {
        "model": "tiny", "policy": "exact", "tokens": 600, "alone": None,
    }  # fmt: skip


def test_selfcheck_leaves_nothing_behind(cli, tmp_path, monkeypatch, model_dir):
    work = tmp_path / "tmp"
    work.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(work))
    args = ["--model", str(model_dir("llama")), "--tokens", "300", "--chunk", "256"]
    report = cli.json("selfcheck", *args)
    assert (report["tokens"], report["policy"]) == (300, "both")
    assert len(report["cases"]) == 2 * len(CASE_NAMES)
    assert not list(work.iterdir())


def test_selfcheck_takes_a_prompt_of_almost_four_chunks_unless_told(cli, model_dir):
    args = ["--model", str(model_dir("llama")), "--chunk", "256"]
    result = cli.run("selfcheck", *args, "--policy", "nearest")
    assert result.exit_code == 0, result.output
    last = str(4 * 256 - 20 - 1)
    assert ["prompt", "nearest", last, last, "0"] in [
        line.split() for line in result.stdout.splitlines()
    ]


def test_selfcheck_of_too_short_a_prompt_is_refused(cli, model_dir):
    args = ["--model", str(model_dir("llama")), "--tokens", "100"]
    assert cli.refusal("selfcheck", *args) == "setting"


SOME = ("--all-architectures", "--only", "mamba2", "--only", "llama")


def test_selfcheck_of_architectures_passes(cli):
    report = cli.json("selfcheck", *SOME)
    llama, mamba2 = report["architectures"]
    for found, name in ((llama, "llama"), (mamba2, "mamba2")):
        assert (found["name"], found["refused"], found["passed"]) == (name, None, True)
        assert (found["max_diff_to_hot"], found["max_diff_to_cold"]) == (0.0, 0.0)
        assert len(found["cases"]) == 2 * len(CASE_NAMES)
    assert report["passed"]


def test_selfcheck_of_architectures_lists_refused_ones_and_fails(cli, monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedModelError("cache 0 (Strange) is of a kind that is unknown")

    monkeypatch.setattr(architectures, "selfcheck", refuse)
    result = cli.run("selfcheck", *SOME)
    assert result.exit_code == 1
    assert "refused: cache 0 (Strange)" in result.stdout


def test_selfcheck_of_an_architecture_that_restores_nothing_fails(cli, monkeypatch):
    monkeypatch.setattr(restore, "_ATTEMPTS", 0)
    result = cli.run("selfcheck", *SOME, "--policy", "nearest")
    assert result.exit_code == 1
    head, llama, mamba2, *facts = result.stdout.splitlines()
    assert head.split() == list(COLUMNS)
    assert "restored 0, not 171" in llama
    assert "restored 0, not 171" in mamba2
    assert facts[-1].split() == ["result", "FAILED:", "llama,", "mamba2"]


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
