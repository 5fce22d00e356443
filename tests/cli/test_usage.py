"""Wrong usage ends with 2 and says what to write instead; nothing is started."""

import json
import signal
import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Files of every kind in the current directory."""
    contents = {
        "text": "hello",
        "not-json": "{",
        "tokens": "[1, 2, 3]",
        "no-tokens": '["1"]',
        "bools": "[true]",
        "chat": json.dumps([{"role": "user", "content": "hello"}]),
        "no-chat": '{"message": []}',
        "more-chat": '{"messages": [], "model": "m"}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin1").write_bytes(b"\xe9")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ([], "Name one prompt"),
        (["hello", "--prompt-file", "text"], "Name one prompt"),
        (["--tokens-file", "tokens", "--messages-file", "chat"], "Name one prompt"),
        (["--prompt-file", "missing"], "No such file"),
        (["--prompt-file", "latin1"], "not text in UTF-8"),
        (["--tokens-file", "not-json"], "not JSON"),
        (["--tokens-file", "no-tokens"], "not a list of token ids"),
        (["--tokens-file", "bools"], "not a list of token ids"),
        (["--tokens-file", "chat"], "not a list of token ids"),
        (["--messages-file", "not-json"], "not JSON"),
        (["--messages-file", "no-chat"], "neither a list of messages"),
        (["--messages-file", "more-chat"], "neither a list of messages"),
    ],
)
@pytest.mark.parametrize("command", ["complete", "probe"])
def test_a_prompt_is_named_exactly_once_and_well_formed(cli, command, args, hint):
    result = cli.run(command, *args)
    assert result.exit_code == 2, result.output
    assert hint in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--chunk", "300"], "300 is not a multiple of the block size, 256"),
        (["--stride", "600"], "600 is not a multiple of the chunk, 512"),
        (["--block-size", "512", "--chunk", "256"], "not a multiple of the block size"),
        (["--block-size", "0"], "--block-size"),
        (["--cap", "many"], "not a size such as 500MB or 8GiB"),
        (["--live-memory", "many"], "not a size such as 500MB or 8GiB"),
        (["--port", "70000"], "--port"),
        (["--policy", "best"], "--policy"),
        (["--model", "=x"], "not NAME=PATH"),
        (["--model", "x="], "not NAME=PATH"),
    ],
)
def test_serve_refuses_settings_that_do_not_fit(cli, args, hint):
    result = cli.run("serve", "--model", "nowhere", *args)
    assert result.exit_code == 2, result.output
    assert hint in " ".join(result.stderr.replace("│", " ").split())
    assert not cli.home.exists()


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://host", "http://", "http://[x", "http://h:99999"]
)
def test_an_address_is_a_web_address(cli, url):
    result = cli.run("cache", "stats", "--url", url)
    assert result.exit_code == 2
    assert "not an address such as" in result.stderr


def test_serve_needs_a_model(cli):
    assert cli.run("serve").exit_code == 2


def test_selfcheck_refuses_a_chunk_that_is_no_multiple_of_the_block(cli):
    result = cli.run("selfcheck", "--model", "x", "--tokens", "9", "--chunk", "100")
    assert result.exit_code == 2
    assert "must be a multiple of 256" in result.stderr


@pytest.mark.parametrize("args", [["bogus"], ["cache", "bogus"], ["--bogus"]])
def test_unknown_commands_and_options_are_wrong_usage(cli, args):
    assert cli.run(*args).exit_code == 2


def test_ctrl_c_ends_a_command_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvport.api", "probe", "--prompt-file", "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    # More than a pipe holds: once it is written, the command is reading.
    process.stdin.write(b"x" * (1 << 20))
    process.send_signal(signal.SIGINT)
    out, words = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert out == b""
    assert b"Traceback" not in words
