"""`kvport serve` as a process: how it starts, what it refuses, how it ends."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvport.api.cli.serve import CHUNK, STRIDE
from kvport.api.cli.starting import claimed
from kvport.api.demo.servers import starting_server
from kvport.api.errors import UnreachableError
from kvport.api.run_file import is_locked, running
from kvport.snapshot.errors import HomeInUseError, SettingError
from tests.cli.conftest import Cli


def command(home, *args: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "kvport.api",
        "serve",
        "--home",
        str(home),
        "--free-floor",
        "0",
        *args,
    ]


def refusal(home, *args: str) -> tuple[str, str]:
    """The code with which the server does not start, and what it says."""
    done = subprocess.run(
        command(home, *args, "--json"), check=False, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    problem = json.loads(done.stdout)
    return problem["code"], problem["detail"]


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


def test_it_starts_without_a_model_and_keeps_models_as_it_is_told(tmp_path, model):
    home = tmp_path / "home"
    with started(home, "--keep-alive", "2h", "--no-cache") as (_, line):
        assert "no models yet" in line
        loaded = Cli(home).json("models", "load", model)
        assert (loaded["keep_alive"], loaded["cached"]) == (7200, False)


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


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


def test_a_taken_port_is_refused(server, home, model):
    port = str(running(server.home).port)
    code, _ = refusal(home, "--model", model, "--port", port)
    assert code == "port"
    assert not home.exists()


@pytest.mark.parametrize("names", [("m=", "m="), ("", ""), ("", "llama=")])
def test_two_models_of_one_name_are_refused(home, model, names):
    models = [arg for name in names for arg in ("--model", f"{name}{model}")]
    code, said = refusal(home, *models, "--port", "0")
    assert code == "setting"
    assert "NAME=PATH" in said
    assert not home.exists()


@pytest.mark.parametrize("source", ["/no/such/directory", "./none", __file__])
def test_what_is_no_directory_is_refused_by_name(home, source):
    code, said = refusal(home, "--model", source, "--port", "0")
    assert code == "model_load"
    assert source in said
    assert not home.exists()


def test_a_directory_that_is_no_model_is_refused(tmp_path, home):
    (tmp_path / "empty").mkdir()
    code, _ = refusal(home, "--model", str(tmp_path / "empty"), "--port", "0")
    assert code == "model_load"


def test_a_cap_that_is_too_small_leaves_no_home_behind(home, model):
    code, _ = refusal(home, "--model", model, "--cap", "1KiB", "--port", "0")
    assert code == "cap"
    assert not home.exists()
    home.mkdir()
    refusal(home, "--model", model, "--cap", "1KiB", "--port", "0")
    assert home.exists()


def test_a_home_in_use_is_refused_by_name(server, model):
    code, said = refusal(server.home, "--model", model, "--port", "0")
    assert code == "home_in_use"
    assert str(server.home) in said


def test_a_cache_in_use_is_refused_by_name(server, home, model):
    cache = str(server.home / "cache")
    args = ["--model", model, "--cache-dir", cache, "--port", "0"]
    code, said = refusal(home, *args)
    assert code == "cache_in_use"
    assert cache in said
    assert not home.exists()
    done = subprocess.run(
        command(home, *args), check=False, capture_output=True, text=True
    )
    assert "cache_lost" not in done.stderr


def test_the_defaults_are_those_of_the_engine():
    from kvport.snapshot.engine.tuning import Tuning

    engine = Tuning()
    assert (engine.chunk, engine.stride) == (CHUNK, STRIDE)


def fail_in_claim(home: Path, *, released: bool) -> None:
    with claimed(home) as claim:
        assert (home / "lock").exists()
        if released:
            claim.release()
        raise SettingError("no")


def test_a_failed_start_removes_only_a_home_that_it_made_and_still_holds(home):
    for released, left in ((False, False), (True, True), (False, True)):
        with pytest.raises(SettingError):
            fail_in_claim(home, released=released)
        assert home.exists() == left


def test_a_claimed_home_is_not_claimed_twice(home):
    with claimed(home), pytest.raises(HomeInUseError), claimed(home):
        pass


def test_a_command_waits_for_a_server_that_is_starting(home, model):
    with subprocess.Popen(
        command(home, "--port", "0", "--model", model, "--no-cache"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            while not is_locked(home):
                assert process.poll() is None
            assert running(home) is None
            listed = Cli(home).json("models", "list")
        finally:
            process.kill()
    assert [one["name"] for one in listed["models"]] == ["llama"]


def test_it_ends_with_standard_input_if_it_is_told_to(home, model):
    with subprocess.Popen(
        command(home, "--port", "0", "--model", model, "--exit-with-stdin"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert str(home) in process.stdout.readline()
            process.stdin.close()
            assert process.wait(60) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert running(home) is None


def test_a_server_of_the_demonstration_that_does_not_start_says_why(server, model):
    with (
        starting_server(server.home, [model], "--no-cache") as process,
        pytest.raises(UnreachableError, match="another process runs"),
    ):
        process.await_ready()
