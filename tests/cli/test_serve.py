"""`kvport serve` as a process: how it starts, what it refuses, how it ends."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvport.api.demo.servers import starting_server
from kvport.api.errors import UnreachableError
from kvport.api.run_file import running


def command(home, *args: str) -> list[str]:
    return [sys.executable, "-m", "kvport.api", "serve", "--home", str(home), *args]


def refusal(home, *args: str) -> str:
    """The code with which the server does not start."""
    done = subprocess.run(
        command(home, *args, "--json"), check=False, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["code"]


@contextmanager
def started(home, *args: str):
    """A server and the line that it printed when it was ready."""
    process = subprocess.Popen(
        command(home, "--port", "0", *args),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def model(model_dir) -> str:
    return str(model_dir("llama"))


def test_it_says_where_it_serves_and_ctrl_c_ends_it(tmp_path, model):
    home = tmp_path / "home"
    with started(home, "--model", model, "--no-cache") as (process, line):
        info = running(home)
        assert info.pid == process.pid
        assert info.url in line
        assert str(home) in line
        assert str(home / "keys" / "api.key") in line
        _ends_in_order(process, signal.SIGINT)
    assert running(home) is None


def test_its_line_as_json_names_what_programs_need(tmp_path, model):
    home = tmp_path / "home"
    with started(home, "--model", f"tiny={model}", "--json") as (process, line):
        facts = json.loads(line)
        assert facts["url"] == running(home).url
        assert facts["models"] == ["tiny"]
        assert Path(facts["key_file"]).samefile(home / "keys" / "api.key")
        _ends_in_order(process, signal.SIGTERM)


def _ends_in_order(process: subprocess.Popen, number: signal.Signals) -> None:
    process.send_signal(number)
    out, log = process.communicate()
    assert process.returncode == 0, log
    assert out == ""
    assert "model_loaded" in log
    assert "Traceback" not in log


def test_a_taken_port_is_refused(server, tmp_path, model):
    port = str(running(server.home).port)
    assert refusal(tmp_path / "home", "--model", model, "--port", port) == "port"


def test_two_models_of_one_name_are_refused(tmp_path, model):
    models = ["--model", f"m={model}"] * 2
    assert refusal(tmp_path / "home", *models, "--port", "0") == "bad_prompt"


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    args = ["--model", str(tmp_path / "empty"), "--port", "0"]
    assert refusal(tmp_path / "home", *args) == "model_load"


def test_a_server_of_the_demonstration_that_does_not_start_says_why(server, model):
    with (
        starting_server(server.home, [model], "--no-cache") as process,
        pytest.raises(UnreachableError, match="another process runs"),
    ):
        process.await_ready()
