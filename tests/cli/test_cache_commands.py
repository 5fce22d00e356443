"""`kvport cache ...`, on a running server and on a home without one."""

import itertools
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvport.api.demo.servers import starting_server
from kvport.snapshot.home_lock import lock
from kvport.snapshot.units import format_bytes
from tests.cache.builder import walk
from tests.cli.conftest import Cli

FIRST = itertools.count(0x430)
MODEL = ["--model", "llama"]


def text() -> str:
    return chr(next(FIRST)) + "the tide comes in, and goes out again. " * 10


@pytest.fixture(scope="module")
def stored(tmp_path_factory, model_dir):
    """A home whose server has ended, with state of two models, never changed."""
    home = tmp_path_factory.mktemp("stored") / "home"
    models = [str(model_dir("llama")), str(model_dir("qwen3_5"))]
    with starting_server(home, models, "--cap", "256MiB") as process:
        process.await_ready()
        cli = Cli(home)
        for model in ("llama", "qwen3_5"):
            for _ in range(2):
                cli.json("complete", text(), "--max-tokens", "4", "--model", model)
        stats = cli.json("cache", "stats")
    return home, stats


@pytest.fixture
def offline(stored, tmp_path):
    """A copy of that home, to be changed; its cache is where the home says."""
    home, _ = stored
    subprocess.run(["cp", "-a", str(home), str(tmp_path / "home")], check=True)
    roots = tmp_path / "home" / "cache-roots.json"
    roots.write_text(roots.read_text().replace(str(home), str(tmp_path / "home")))
    return Cli(tmp_path / "home")


def namespace(cli, model):
    found = cli.json("cache", "namespace")["namespaces"]
    return next(one for one in found if one["model"] == model)


# With a server.


def test_namespace_shows_and_sets_what_a_server_holds(server):
    before = namespace(server, "llama")
    table = server.run("cache", "namespace").stdout
    assert table == server.run("cache", "namespace", "list").stdout
    assert before["id"][:8] in table
    one = server.json(
        "cache", "namespace", "set", "llama", "--quota", "128MiB", "--ttl", "30d",
        "--reclaim", "--write-per-hour", "1GiB", "--retention", "newest=4096,prompts=2",
    )  # fmt: skip
    settings = one["settings"]
    assert settings["quota_bytes"] == 128 << 20
    assert settings["ttl"] == 30 * 86_400
    assert settings["reclaim_on_unload"] is True
    assert settings["write_bytes_per_hour"] == 1 << 30
    assert settings["retention"]["newest"] == 4096
    shown = server.run("cache", "namespace", "set", "llama", "--ttl", "12h").stdout
    assert "ttl             12h" in shown
    assert "quota           128.0 MiB" in shown
    server.json(
        "cache", "namespace", "set", "llama", "--quota", "none", "--ttl", "none",
        "--no-reclaim", "--write-per-hour", "none", "--retention", "none", "--tier",
        "none",
    )  # fmt: skip
    assert namespace(server, "llama")["settings"] == before["settings"]


def test_wrong_settings_are_refused(server):
    assert server.refusal("cache", "namespace", "set", "nobody", "--ttl", "1d") == (
        "unknown_namespace"
    )
    for wrong in (
        [], ["--quota", "many"], ["--quota", "0"], ["--ttl", "-1"], ["--tier", "x"],
        ["--retention", "newest"], ["--retention", "newest=0"],
        ["--retention", "oldest=3"],
    ):  # fmt: skip
        result = server.run("cache", "namespace", "set", "llama", *wrong)
        assert result.exit_code == 2, result.output


def test_plan_gc_pins_and_clear_talk_to_the_server(server):
    prompt = text()
    server.json("complete", prompt, "--max-tokens", "4")
    server.json("probe", prompt)
    assert server.json("cache", "plan")["rows"] == []
    plan = server.json("cache", "plan", "--quota", "llama=4KiB")
    assert plan["bytes"] > 0
    shown = server.run("cache", "plan", "--quota", "llama=4KiB").stdout
    assert "quota" in shown
    assert "would be removed" in shown
    assert server.json("cache", "gc", "--yes")["freed_bytes"] == 0
    assert server.json("cache", "pins") == {"leases": [], "pins": []}
    nobody = server.run("cache", "unpin", "nobody")
    assert (nobody.exit_code, nobody.stdout) == (1, "nothing is pinned by nobody\n")
    cleared = server.json("cache", "clear", "--namespace", "llama", "--yes")
    assert cleared["freed_bytes"] >= plan["bytes"]
    assert server.json("probe", prompt)["restorable_tokens"] == 0
    assert "0 B freed" in server.run("cache", "clear", "--yes").stdout


def test_scrub_starts_in_the_server(server):
    server.json("complete", text(), "--max-tokens", "4")
    assert server.json("cache", "scrub", "--rate", "1")["running"]
    assert server.json("cache", "scrub", "--status")["running"]
    again = server.run("cache", "scrub", "--rate", "1")
    assert "`kvport cache scrub --status`" in again.stderr
    assert not server.json("cache", "scrub", "--stop")["running"]


def test_a_cache_directory_is_not_named_where_a_server_runs(server, tmp_path):
    for more in ([], ["--url", "http://127.0.0.1:1"]):
        result = server.run("cache", "plan", "--cache-dir", str(tmp_path), *more)
        assert result.exit_code == 2


# Without one.


def test_stats_are_those_of_the_server(stored, offline):
    _, before = stored
    after = offline.json("cache", "stats")
    assert after["models"] == {}
    assert after["total_bytes"] == walk(offline.home / "cache")
    ids = [one["id"] for one in before["cache"]["namespaces"]]
    assert [one["id"] for one in after["cache"]["namespaces"]] == ids
    assert sum(one["segments"] for one in after["cache"]["namespaces"]) > 0
    assert "(index)" in offline.run("cache", "stats").stdout


def test_looking_removes_nothing(offline):
    before = offline.json("cache", "namespace")
    files = sorted((offline.home / "cache").rglob("*"))
    plan = offline.json("cache", "plan", "--cap", "4MiB")
    for command in (
        ["plan"], ["stats"], ["pins"], ["artifacts"], ["scrub", "--status"],
    ):  # fmt: skip
        offline.json("cache", *command)
    assert offline.json("cache", "namespace") == before
    assert sorted((offline.home / "cache").rglob("*")) == files
    assert plan["missing_bytes"] == 0


def test_settings_are_kept_for_the_next_start(offline):
    quota = namespace(offline, "llama")["bytes"] // 2
    plan = offline.json("cache", "plan", "--quota", f"llama={quota}")
    held = namespace(offline, "llama")["bytes"]
    one = offline.json("cache", "namespace", "set", "llama", "--quota", str(quota))
    assert one["settings"]["quota_bytes"] == quota
    assert one.pop("freed_bytes") == held - one["bytes"] == plan["bytes"] > 0
    assert one.pop("removed") == {"quota": plan["segments"]}
    assert one.pop("warnings") == []
    assert namespace(offline, "llama") == one
    shown = offline.run("cache", "namespace", "set", "llama", "--quota", "1").stdout
    assert "segments removed: quota" in shown
    assert "freed" in shown


def test_show_says_what_is_set_and_where(offline):
    (offline.home / "config.toml").write_text(
        '[namespaces.default]\nttl = "30d"\n'
        "[namespaces.llama]\nreclaim_on_unload = true\nretention = { prompts = 3 }\n"
    )
    command = ("cache", "namespace")
    offline.json(*command, "set", "llama", "--write-per-hour", "2GiB")
    one = offline.json(*command, "show", "llama")
    assert one == namespace(offline, "llama")
    assert one["origins"] == {
        "ttl": "config.toml, [namespaces.default]",
        "reclaim_on_unload": "config.toml, [namespaces.llama]",
        "retention": "config.toml, [namespaces.llama]",
        "write_bytes_per_hour": "command",
    }
    shown = " ".join(offline.run(*command, "show", one["id"][:8]).stdout.split())
    assert "write per hour 2.0 GiB (by command)" in shown
    assert "ttl 30d (by config.toml, [namespaces.default])" in shown
    assert "prompts=3" in shown
    (line,) = (
        line
        for line in offline.run(*command).stdout.splitlines()
        if line.startswith("llama")
    )
    assert "2.0 GiB" in line
    assert "reclaim, retention" in line
    assert offline.refusal(*command, "show", "nobody") == "unknown_namespace"


def test_b21_clear_works_with_nothing_loaded_and_for_all_kinds(offline):
    held = sum(one["bytes"] for one in offline.json("cache", "namespace")["namespaces"])
    of_state = namespace(offline, "qwen3_5")["kinds"]["state"]["bytes"]
    part = offline.json("cache", "clear", "--kind", "recurrent", "--yes")
    assert part["freed_bytes"] == of_state > 0
    rest = offline.json("cache", "clear", "--yes")
    assert rest["freed_bytes"] == held - of_state
    assert rest["kept"] == {"leased": 0, "pinned": 0, "shared": 0}
    stats = offline.json("cache", "stats")
    assert stats["cache"]["account"]["blobs"] == 0
    assert stats["total_bytes"] == walk(offline.home / "cache")


def test_gc_says_how_much_strangers_files_took(offline, server):
    """Without a server they go when the cache is opened, which is for `gc`'s sake."""
    for cli in (offline, server):
        root = cli.home / "cache"
        known = next(path for path in (root / "ns").iterdir() if path.is_dir())
        cli.run("cache", "gc", "--yes")
        for stray in (root / "staging" / "stray", known / "stray"):
            stray.write_bytes(bytes(10_000))
        freed = cli.json("cache", "gc", "--yes")["freed_bytes"]
        assert 20_000 <= freed < 60_000
        assert not stray.exists()
        assert cli.json("cache", "gc", "--yes")["freed_bytes"] == 0


def test_gc_and_scrub_run_here(offline):
    blobs = [p for p in (offline.home / "cache").rglob("*") if len(p.name) == 64]
    victim = next(path for path in blobs if path.is_file())
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    found = offline.json("cache", "scrub", "--rate", "1GiB")
    assert found["damaged"] == 1
    assert not found["running"]
    assert found["completed"]
    assert offline.json("cache", "gc", "--yes")["freed_bytes"] >= 0
    again = offline.json("cache", "scrub", "--rate", "1GiB")
    assert again["damaged"] == 0
    assert "damaged         0 files" in offline.run("cache", "scrub").stdout
    status = offline.json("cache", "scrub", "--status")
    completed = status["completed"]
    assert completed is not None
    assert (status["running"], status["remaining"]) == (False, 0)
    assert completed in offline.run("cache", "scrub", "--status").stdout
    assert "no scrub is running" in offline.run("cache", "scrub", "--stop").stderr


def test_gc_with_no_state_to_remove_does_not_ask(offline):
    code, shown = on_terminal(offline, b"", "cache", "gc")
    assert (code, "[y/N]" in shown) == (0, False)
    assert "0 B freed" in shown


def test_a_quota_above_the_cap_is_said(server):
    command = ("cache", "namespace", "set", "llama", "--quota")
    assert server.json(*command, "128MiB")["warnings"] == []
    [warning] = server.json(*command, "300MiB")["warnings"]
    assert "above what the cache may hold" in warning
    assert f"warning: {warning}" in server.run(*command, "300MiB").stderr
    assert server.json(*command, "none")["warnings"] == []


def test_after_unpin_a_quota_is_met_at_once(server):
    asked = text()
    server.json("complete", asked, "--max-tokens", "4", "--pin", "zed=5m")
    command = ("cache", "namespace", "set", "llama", "--quota")
    one = server.json(*command, "4KiB")
    assert one["over_quota_bytes"] > 0
    assert str(one["over_quota_bytes"]) in one["warnings"][0]
    plan = server.json("cache", "plan", "--quota", "llama=4KiB")
    assert plan["over_quota_bytes"] == {one["id"]: one["over_quota_bytes"]}
    assert plan["missing_bytes"] == plan["in_use_bytes"] == one["over_quota_bytes"]
    shown = server.run("cache", "plan").stdout
    assert f"above the quota of {one['id'][:8]}" in shown
    ended = server.json("cache", "unpin", "zed")
    assert ended["released"] == 1
    assert ended["freed_bytes"] >= one["over_quota_bytes"]
    assert namespace(server, "llama")["over_quota_bytes"] == 0
    server.json(*command, "none")


def test_an_unknown_number_of_a_retention_is_told_from_those_there_are(offline):
    for wrong in ("oldest=3", "prompts=2,foo=1"):
        result = offline.run("cache", "namespace", "set", "llama", "--retention", wrong)
        shown = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2
        assert "newest, every, forks, prompts, replies" in shown


def test_clear_asks_on_a_terminal_and_needs_yes_without(offline):
    result = offline.run("cache", "clear")
    assert result.exit_code == 2
    assert "--yes" in result.output
    for answer, freed in ((b"n\n", False), (b"y\n", True)):
        held = format_bytes(namespace(offline, "llama")["bytes"])
        code, shown = on_terminal(
            offline, answer, "cache", "clear", "--namespace", "llama"
        )
        assert f"Remove the state that meets this ({held} at most)" in shown
        assert (code == 0) is freed
        assert (namespace(offline, "llama")["bytes"] == 0) is freed


def test_gc_shows_what_goes_and_asks(offline, request):
    """A model on a disk that is not mounted must not cost its state in silence."""
    held = namespace(offline, "llama")["bytes"]
    source = Path(namespace(offline, "llama")["source"])
    moved = source.rename(source.with_name("unmounted"))
    request.addfinalizer(lambda: moved.rename(source))
    assert offline.json("cache", "plan")["rows"] == []
    (row,) = offline.json("cache", "plan", "--gc")["rows"]
    assert (row["model"], row["reason"]) == ("llama", "incompatible")
    assert row["bytes"] == held
    assert row["detail"] == "its model's directory is gone"
    result = offline.run("cache", "gc")
    assert (result.exit_code, "--yes" in result.output) == (2, True)
    for answer, left in ((b"n\n", held), (b"y\n", 0)):
        code, shown = on_terminal(offline, answer, "cache", "gc")
        assert "its model's directory is gone" in shown
        assert (code == 0) is (left == 0)
        assert namespace(offline, "llama")["bytes"] == left


def test_a_plan_takes_the_limits_of_serve(offline):
    assert offline.refusal("cache", "plan", "--cap", "1KiB") == "cap"
    everything = sum(
        one["bytes"] for one in offline.json("cache", "namespace")["namespaces"]
    )
    assert offline.json("cache", "plan", "--cap", "auto")["bytes"] == 0
    assert offline.json("cache", "plan", "--free-floor", "auto")["bytes"] == 0
    plan = offline.json("cache", "plan", "--free-floor", "1000TiB")
    assert plan["bytes"] == everything
    assert plan["missing_bytes"] > 0 == plan["in_use_bytes"]
    shown = offline.run("cache", "plan", "--free-floor", "1000TiB").stdout
    assert "is for the index" in shown
    assert "in use" not in shown


def on_terminal(cli, answer, *args):
    """The exit code of a command in a terminal, and what it showed."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kvport.api", *args, "--home", str(cli.home)]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        os.write(leader, answer)
        shown = b""
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:
                break
            if not piece:
                break
            shown += piece
    os.close(leader)
    return process.returncode, shown.decode()


def test_commands_without_a_server_load_neither_mlx_nor_the_framework(offline):
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from kvport.api.cli.commands import root\n"
        f"home = {str(offline.home)!r}\n"
        "for command in ('stats', 'namespace', 'plan', 'gc', 'pins', 'artifacts'):\n"
        "    more = ['--yes'] if command == 'gc' else []\n"
        "    args = ['cache', command, '--home', home, '--json', *more]\n"
        "    assert CliRunner().invoke(root, args).exit_code == 0, command\n"
        "heavy = {'mlx', 'mlx_lm', 'litestar', 'uvicorn', 'prometheus_client'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == []


def test_a_home_without_a_cache_is_named(cli):
    assert cli.refusal("cache", "plan") == "no_home"
    cli.home.mkdir()
    assert cli.refusal("cache", "plan") == "missing_root"
    assert list(cli.home.iterdir()) in ([], [cli.home / "lock"])


def test_a_root_that_is_not_there_is_not_made(offline):
    (offline.home / "cache").rename(offline.home / "elsewhere")
    assert offline.refusal("cache", "stats") == "missing_root"
    assert not (offline.home / "cache").exists()
    moved = str(offline.home / "elsewhere")
    assert offline.json("cache", "stats", "--cache-dir", moved)["total_bytes"] > 0
    empty = offline.home / "empty"
    empty.mkdir()
    refused = offline.run("cache", "stats", "--cache-dir", str(empty))
    assert f"error[missing_root]: {empty}: no cache is there" in refused.stderr
    assert list(empty.iterdir()) == []


def test_of_several_caches_one_must_be_named(offline):
    roots = offline.home / "cache-roots.json"
    known = json.loads(roots.read_text())
    roots.write_text(json.dumps({**known, "/nowhere": "x"}))
    assert offline.refusal("cache", "stats") == "setting"
    (root,) = known
    assert offline.json("cache", "stats", "--cache-dir", root)["total_bytes"] > 0


def test_a_command_waits_for_another_one(offline):
    descriptor = lock(offline.home)
    threading.Timer(0.5, os.close, (descriptor,)).start()
    assert offline.json("cache", "namespace")["namespaces"]
