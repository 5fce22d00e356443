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
        "not-json": "{\n  bare: 1}",
        "deep": "[" * 100_000,
        "tokens": "[1, 2, 3]",
        "no-tokens": '["1"]',
        "bools": "[true]",
        "chat": json.dumps([{"role": "user", "content": "hello"}]),
        "no-chat": '{"message": []}',
        "more-chat": '{"messages": [], "model": "m"}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "directory").mkdir()
    (tmp_path / "latin1").write_bytes(b"\xe9")
    monkeypatch.chdir(tmp_path)


def wrong_usage(cli, *args: str) -> str:
    """What is said of wrong usage, without --json; with it the same is told."""
    plain = cli.run(*args)
    assert plain.exit_code == 2, plain.output
    assert plain.stdout == ""
    told = cli.run(*args, "--json")
    assert told.exit_code == 2
    assert told.stderr == ""
    problem = json.loads(told.stdout)
    assert problem["code"] == "usage"
    assert "--help" in problem["advice"]
    words = "".join(plain.stderr.replace("│", " ").split())
    assert "".join(problem["detail"].split()) in words
    return problem["detail"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["hello", "--prompt-file", "text"],
        ["--tokens-file", "tokens", "--messages-file", "chat"],
    ],
)
@pytest.mark.parametrize("command", ["complete", "probe"])
def test_a_prompt_is_named_exactly_once(cli, command, args):
    assert "Name one prompt" in wrong_usage(cli, command, *args)


@pytest.mark.parametrize(
    ("option", "name", "hint"),
    [
        ("--prompt-file", "missing", "No such file"),
        ("--prompt-file", "directory", "Is a directory"),
        ("--prompt-file", "latin1", "not text in UTF-8"),
        ("--tokens-file", "not-json", "not JSON: line 2, column 3"),
        ("--tokens-file", "deep", "not JSON"),
        ("--tokens-file", "no-tokens", "not a list of token ids"),
        ("--tokens-file", "bools", "not a list of token ids"),
        ("--tokens-file", "chat", "not a list of token ids"),
        ("--messages-file", "not-json", "not JSON: line 2, column 3"),
        ("--messages-file", "no-chat", "neither a list of messages"),
        ("--messages-file", "more-chat", "neither a list of messages"),
    ],
)
@pytest.mark.parametrize("command", ["complete", "probe", "export"])
def test_a_file_that_is_no_prompt_is_refused_by_name(cli, command, option, name, hint):
    output = ["-o", "x"] if command == "export" else []
    args = [command, option, name, *output]
    assert cli.refusal(*args) == "local_file"
    assert f"{name}: {hint}" in cli.run(*args).stderr


def test_standard_input_that_is_no_prompt_is_called_so(cli):
    result = cli.run("probe", "--tokens-file", "-", stdin=b"{}")
    assert result.exit_code == 1
    assert "standard input: not a list of token ids" in result.stderr


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--chunk", "300"], "300 is not a multiple of the block size, 256"),
        (["--stride", "600"], "600 is not a multiple of the chunk, 512"),
        (["--block-size", "512", "--chunk", "256"], "not a multiple of the block size"),
        (["--block-size", "0"], "--block-size"),
        (["--cap", "many"], "'--cap': 'many' is not a size such as 500MB or 8GiB"),
        (["--live-memory", "many"], "'--live-memory': 'many' is not a size"),
        (["--port", "70000"], "--port"),
        (["--policy", "best"], "--policy"),
        (["--model", "=x"], "not NAME=PATH"),
        (["--model", "x="], "not NAME=PATH"),
    ],
)
def test_serve_refuses_settings_that_do_not_fit(cli, args, hint):
    assert hint in wrong_usage(cli, "serve", "--model", "nowhere", *args)
    assert not cli.home.exists()


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://host", "http://", "http://[x", "http://h:99999"]
)
def test_an_address_is_a_web_address(cli, url):
    said = wrong_usage(cli, "cache", "stats", "--url", url)
    assert "'--url': not an address such as" in said


def test_a_server_elsewhere_needs_its_key(cli):
    said = wrong_usage(cli, "cache", "stats", "--url", "http://127.0.0.1:9")
    assert "KVPORT_API_KEY" in said
    assert "--api-key-file" in said
    said = wrong_usage(cli, "cache", "stats", "--api-key-file", "text")
    assert "goes with --url" in said


def test_selfcheck_refuses_a_chunk_that_is_no_multiple_of_the_block(cli):
    result = cli.run("selfcheck", "--model", "x", "--tokens", "9", "--chunk", "100")
    assert result.exit_code == 2
    assert "must be a multiple of 256" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--model", "x", "--all-architectures"],
        ["--model", "x", "--only", "llama"],
        ["--all-architectures", "--tokens", "300"],
        ["--all-architectures", "--only", "bogus"],
    ],
)
def test_selfcheck_takes_either_a_model_or_architectures(cli, args):
    wrong_usage(cli, "selfcheck", *args)


@pytest.mark.parametrize("args", [["bogus"], ["cache", "bogus"], ["--bogus"]])
def test_unknown_commands_and_options_are_wrong_usage(cli, args):
    wrong_usage(cli, *args)


def test_json_as_an_argument_does_not_ask_for_json(cli):
    result = cli.run("probe", "--", "--json", "two prompts")
    assert result.exit_code == 2
    assert result.stdout == ""


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
    assert words == b"interrupted\n"


@pytest.mark.parametrize("module", ["kvport.api.cli.commands", "kvport.api.cli.keys"])
def test_ctrl_c_while_commands_are_imported_ends_without_a_traceback(cli, module):
    code = f"""
import signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from kvport.api.cli import main
main(prog_name="kvport")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "keys", "show", "--home", str(cli.home)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["serve", "selfcheck"])
def test_keys_and_values_are_of_one_form(cli, command):
    forms = ["--kv-bits", "4", "--max-kv-size", "64"]
    told = wrong_usage(cli, command, "--model", "directory", *forms)
    assert "exclude each other" in told
    assert "x>=5" in wrong_usage(cli, command, "--model", "x", "--max-kv-size", "4")
