"""What a home knows of its last server: where its cache is, and under which limits."""

import subprocess
import sys

import pytest

from kvport.api.demo.servers import starting_server
from kvport.manifest.limits import MIB
from tests.cache.volume import mounted

TEXT = "the tide comes in, and goes out again. " * 20
SHOWN = ("total_bytes", "cap_bytes", "effective_cap_bytes", "used_percent")


@pytest.fixture
def volume(tmp_path):
    path = tmp_path / "volume"
    path.mkdir()
    with mounted(path, 64 * MIB) as is_real:
        if not is_real:
            pytest.skip("mounting is not allowed")
        yield path


def serving(home, model, *options):
    return starting_server(home, [str(model)] if model else [], *options)


def numbers(cli):
    stats = cli.json("cache", "stats")
    account = stats["cache"]["account"]
    return {name: stats[name] for name in SHOWN} | {"floor": account["floor"]}


@pytest.mark.parametrize(
    "limits", [("--free-floor", "1MiB"), ("--cap", "16MiB", "--free-floor", "2MiB")]
)
def test_numbers_without_a_server_are_the_last_ones(cli, volume, model_dir, limits):
    where = ("--cache-dir", str(volume / "cache"))
    with serving(cli.home, model_dir("llama"), *where, *limits) as process:
        process.await_ready()
        for first in "abcdefgh":
            cli.json("complete", first + TEXT, "--max-tokens", "2")
        cli.json("cache", "plan")  # takes in what the volume says now
        before = numbers(cli)
    after = numbers(cli)
    # The log of the index is empty after an end, and ours and free are halved.
    assert after["cap_bytes"] == pytest.approx(before["cap_bytes"], abs=64 * 1024)
    assert after["floor"] == before["floor"] > 0
    assert after["used_percent"] == pytest.approx(before["used_percent"], abs=2)


def test_a_server_takes_the_cache_that_its_home_had(cli, tmp_path, model_dir):
    model, cache = model_dir("llama"), tmp_path / "cache"
    limits = ("--cap", "64MiB", "--free-floor", "0")
    with serving(cli.home, model, *limits, "--cache-dir", str(cache)) as process:
        process.await_ready()
        cli.json("complete", TEXT, "--max-tokens", "2")
    with serving(cli.home, model, *limits) as process:
        process.await_ready()
        assert cli.json("complete", TEXT, "--max-tokens", "2")["cached_tokens"] > 0
    assert not (cli.home / "cache").exists()
    other = ("--cache-dir", str(tmp_path / "other"))
    with serving(cli.home, None, *limits, *other) as process:
        process.await_ready()
    command = [sys.executable, "-m", "kvport.api", "serve", "--home", cli.home]
    done = subprocess.run(
        [*command, "--port", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "error[setting]" in done.stderr
    assert "--cache-dir" in done.stderr
    assert not (cli.home / "cache").exists()


def test_a_floor_above_the_volume_is_said_with_what_to_do(cli, volume):
    where = ("--cache-dir", str(volume / "cache"), "--free-floor", "auto")
    with serving(cli.home, None, *where) as process:
        process.await_ready()
        said = [cli.run("cache", "stats").stdout]
    said.append(cli.run("cache", "stats").stdout)
    for text in said:
        assert "64.0 MiB in all, less than the 10.0 GiB" in text
        assert "--free-floor" in text
        assert "and no room for more" in text
        assert str(volume / "cache") in text
    assert cli.json("cache", "stats")["volume"]["state"] == "full"
    assert cli.run("cache", "plan").stderr == ""


def test_a_volume_that_cannot_be_written_is_named(cli, volume):
    where = ("--cache-dir", str(volume / "cache"), "--free-floor", "0")
    with serving(cli.home, None, *where) as process:
        process.await_ready()
    subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
    for command in ("stats", "plan", "namespace", "pins"):
        result = cli.run("cache", command)
        assert "error[read_only]" in result.stderr
        assert str(volume / "cache") in result.stderr


def test_a_missing_cache_directory_is_named(cli, tmp_path):
    cache = tmp_path / "volume" / "cache"
    cache.parent.mkdir()
    where = ("--cache-dir", str(cache), "--free-floor", "0", "--cap", "16MiB")
    with serving(cli.home, None, *where) as process:
        process.await_ready()
    cache.parent.rename(tmp_path / "away")
    with serving(cli.home, None, *where) as process:
        process.await_ready()
        result = cli.run("cache", "gc", "--yes")
        assert "error[cache_absent]" in result.stderr
        assert str(cache) in result.stderr
        assert str(cache) in cli.run("cache", "stats").stdout
    assert str(cache) in cli.run("cache", "stats").stderr


def test_commands_without_a_server_show_no_log(cli, model_dir):
    model, limits = model_dir("llama"), ("--cap", "64MiB", "--free-floor", "0")
    with serving(cli.home, model, *limits) as process:
        process.await_ready()
        cli.json("complete", TEXT, "--max-tokens", "2")
    setting = ("cache", "namespace", "set", "llama", "--quota", "4KiB")
    for args in (("cache", "plan", "--quota", "llama=4KiB"), setting):
        result = cli.run(*args)
        assert (result.exit_code, result.stderr) == (0, "")
