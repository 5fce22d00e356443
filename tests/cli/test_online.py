"""Commands that talk to a server: real ones, in processes of their own."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvport.api.demo.servers import starting_server
from kvport.api.run_file import running
from kvport.snapshot.keyring import Keyring
from tests.cache.builder import walk
from tests.cli.conftest import Cli

ROOM = ["--max-tokens", "4"]
FIRST_CHARACTERS = itertools.count(0x410)


@pytest.fixture
def prompt() -> str:
    """A text of which no server has seen the first character, which is a token."""
    return chr(next(FIRST_CHARACTERS)) + "the tide comes in, and goes out again. " * 10


@pytest.fixture
def pair(server, other_server):
    """The two servers, of which the second trusts the first."""
    key = server.json("keys", "show")["public_key"]
    other_server.json("trust", "add", "--yes", key, "--name", "first server")
    yield server, other_server
    other_server.run("trust", "remove", server.json("keys", "show")["key_id"])


def test_complete_says_what_is_pinned(server, prompt):
    done = server.run("complete", prompt, *ROOM, "--pin", "zed=5m")
    assert done.exit_code == 0, done.output
    assert f"{len(prompt) + 4} restorable tokens are pinned until 20" in done.stderr
    ended = server.run("cache", "unpin", "zed")
    assert (ended.exit_code, ended.stdout) == (0, "1 pin ended\n")


def test_complete_prints_the_reply_and_what_was_restored(server, prompt):
    first = server.run("complete", prompt, *ROOM)
    assert first.exit_code == 0, first.output
    tokens = len(prompt)
    assert f"0 of {tokens} prompt tokens restored, 4 generated" in first.stderr
    again = server.run("complete", prompt, *ROOM)
    assert again.stdout == first.stdout
    assert f"{tokens - 1} of {tokens} prompt tokens restored" in again.stderr


def test_complete_as_json_has_the_same_reply(server, prompt):
    plain = server.run("complete", prompt, *ROOM, "--temperature", "0")
    answer = server.json("complete", prompt, *ROOM, "--model", "llama")
    assert plain.stdout == answer["text"] + "\n"
    assert answer["prompt_tokens"] == len(prompt)
    assert answer["cached_tokens"] == len(prompt) - 1
    assert answer["ttft_s"] > 0
    assert answer["logprobs"] == []


def test_complete_reports_logprobs(server, prompt):
    answer = server.json("complete", prompt, *ROOM, "--logprobs", "3")
    assert len(answer["logprobs"]) == len(answer["tokens"])
    assert all(len(top) == 3 for top in answer["top_logprobs"])
    plain = server.run("complete", prompt, *ROOM, "--logprobs", "3").stdout
    lines = plain.splitlines()[-len(answer["tokens"]) :]
    assert [int(line.split()[0]) for line in lines] == answer["tokens"]


def test_complete_under_exact_restores_less(server, prompt):
    server.run("complete", prompt, *ROOM)
    answer = server.json("complete", prompt, *ROOM, "--policy", "exact")
    assert answer["cached_tokens"] == 0


def test_complete_restores_and_stores_what_it_is_told(server, prompt):
    def cached(*options: str) -> int:
        return server.json("complete", prompt, *ROOM, *options)["cached_tokens"]

    assert cached("--no-write") == cached("--ttl", "12h", "--pin", "a=b=2d") == 0
    assert cached("--no-read", "--no-write") == 0
    assert cached() == len(prompt) - 1
    # The server is every test's: what one pins, it lets go.
    assert server.run("cache", "unpin", "a=b").exit_code == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--pin", "night"),
        ("--pin", "=12h"),
        ("--pin", "night=soon"),
        ("--ttl", "0"),
    ],
)
def test_complete_takes_no_pin_or_time_of_another_form(cli, options):
    assert cli.run("complete", "Hi", *options).exit_code == 2


def test_complete_does_not_pin_what_it_does_not_write(server):
    options = ("--no-write", "--pin", "night=12h")
    assert server.refusal("complete", "Hi", *options) == "bad_request"


def test_prompts_come_from_files_and_standard_input(server, prompt, tmp_path):
    file = tmp_path / "prompt"
    file.write_text(prompt)
    named = server.json("complete", *ROOM, "--prompt-file", str(file))
    piped = server.json("complete", *ROOM, "--prompt-file", "-", stdin=prompt.encode())
    assert named["text"] == piped["text"]
    assert piped["cached_tokens"] == len(prompt) - 1


def test_messages_are_rendered_and_tokens_are_taken_as_they_are(server, prompt):
    messages = json.dumps([{"role": "user", "content": prompt}])
    chat = server.json(
        "complete", *ROOM, "--messages-file", "-", stdin=messages.encode()
    )
    assert chat["prompt_tokens"] > len(prompt)
    tokens = b"[5, 6, 7, 8, 9]"
    plain = server.json("complete", *ROOM, "--tokens-file", "-", stdin=tokens)
    assert plain["prompt_tokens"] == 5


def test_probe_tells_what_a_request_would_restore(server, prompt):
    assert server.json("probe", prompt) == {
        "prompt_tokens": len(prompt), "stored_tokens": 0, "restorable_tokens": 0,
    }  # fmt: skip
    server.run("complete", prompt, *ROOM)
    assert server.json("probe", prompt)["restorable_tokens"] == len(prompt) - 1
    assert f"restorable  {len(prompt) - 1} tokens" in server.run("probe", prompt).stdout


def test_export_writes_a_file_that_the_other_server_imports(pair, prompt, tmp_path):
    server, other = pair
    answer = server.json("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    exported = server.json("export", prompt, "-o", str(file))
    listed = server.json("cache", "artifacts")["artifacts"]
    assert exported["artifact_id"] not in {one["artifact_id"] for one in listed}
    kept = server.json("export", prompt, "--keep", "-o", str(file.with_name("kept")))
    assert kept["prompt_tokens"] == exported["prompt_tokens"]
    [one] = (
        one
        for one in server.json("cache", "artifacts")["artifacts"]
        if one["artifact_id"] == kept["artifact_id"]
    )
    assert (one["direction"], one["stored"]) == ("exported", True)
    assert exported["size_bytes"] == file.stat().st_size
    assert exported["restorable_tokens"] >= len(prompt) - 1
    assert exported["model"] == "llama"

    assert other.json("verify", str(file))["artifact_id"] == exported["artifact_id"]
    imported = other.json("import", str(file), "--model", "first")
    assert imported["artifact_id"] == exported["artifact_id"]
    assert imported["restored_tokens"] >= len(prompt) - 1
    assert imported["admitted_segments"] > 0
    again = other.json("import", str(file), "--model", "first")
    assert again["admitted_segments"] == 0

    there = other.json("complete", prompt, *ROOM, "--model", "first")
    assert there["cached_tokens"] == len(prompt) - 1
    assert there["text"] == answer["text"]
    known = other.json("cache", "artifacts")["artifacts"]
    assert exported["artifact_id"] in {one["artifact_id"] for one in known}
    table = other.run("cache", "artifacts").stdout
    assert exported["artifact_id"].partition(":")[2][:8] in table
    assert all(len(line) <= 80 for line in table.splitlines())


def test_a_compressed_export_is_inspected_verified_and_imported(pair, prompt, tmp_path):
    server, other = pair
    server.json("complete", prompt, *ROOM)
    file = tmp_path / "small.kvport"
    exported = server.json("export", prompt, "--compress", "-o", str(file))
    assert exported["size_bytes"] == file.stat().st_size
    facts = other.json("inspect", str(file))
    assert facts["complete"]
    encoded = facts["codecs"]["shuffle-zstd"]
    assert encoded["encoded_bytes"] < encoded["bytes"] <= sum(facts["bytes"].values())
    assert "shuffle-zstd: " in other.run("inspect", str(file)).stdout
    assert other.json("verify", str(file))["artifact_id"] == exported["artifact_id"]
    imported = other.json("import", str(file), "--model", "first")
    assert imported["restored_tokens"] == exported["restorable_tokens"]


def test_a_sealed_export_is_opened_by_the_machine_it_is_for(pair, prompt, tmp_path):
    server, other = pair
    server.json("complete", prompt, *ROOM)
    file = tmp_path / "sealed.kvport"
    recipient = other.json("keys", "recipient")
    key = other.run("keys", "recipient", "--public-key").stdout.strip()
    assert key == recipient["public_key"]
    exported = server.json("export", prompt, "--to", key, "-o", str(file))
    assert exported["size_bytes"] == file.stat().st_size

    # Everyone sees whose it is and whom it is for; what is inside, only they do.
    facts = other.json("inspect", str(file))
    assert facts["sealed"]
    assert facts["complete"]
    assert facts["recipients"] == [recipient["key_id"]]
    outside = server.json("verify", str(file))
    assert outside["sealed"]
    assert "sealed for others" in server.run("verify", str(file)).stderr
    inside = other.json("verify", str(file))
    assert not inside["sealed"]
    assert inside["tokens"] == exported["restorable_tokens"]
    assert inside["artifact_id"] == outside["artifact_id"] == exported["artifact_id"]

    imported = other.json("import", str(file), "--model", "first")
    assert imported["restored_tokens"] == exported["restorable_tokens"]
    assert server.refusal("import", str(file)) == "wrong_recipient"


def test_inspect_says_how_a_file_fits_here(
    server, other_server, prompt, tmp_path, model_dir
):
    server.json("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    server.json("export", prompt, "-o", str(file))
    assert server.json("inspect", str(file))["here"] == {
        "believed": True, "code": "", "reason": "", "readable": True,
        "mismatched_fields": {"llama": []},
    }  # fmt: skip
    there = other_server.json("inspect", str(file))["here"]
    assert (there["believed"], there["code"]) == (False, "untrusted_key")
    assert there["mismatched_fields"] == {"first": [], "second": []}
    shown = other_server.run("inspect", str(file)).stdout
    assert "refused: the signer" in shown
    assert "fits" in shown
    nobody = Cli(tmp_path / "nobody")
    assert nobody.json("inspect", str(file))["here"] is None


def test_parts_of_a_file_are_computed_again(server, prompt, tmp_path, model_dir):
    server.json("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    exported = server.json("export", prompt, "-o", str(file))
    command = ("selfcheck", "--artifact", str(file), "--model")
    proof = server.json(*command, str(model_dir("llama")), "--accept")
    assert proof["passed"]
    assert not proof["accepted"]
    assert proof["tokens"] == exported["restorable_tokens"]
    assert proof["parts"][-1]["end"] == proof["tokens"]
    shown = server.run(*command, str(model_dir("llama")), "--accept")
    assert "passed" in shown.stdout
    assert "nothing to accept" in shown.stderr
    other = server.refusal(*command, str(model_dir("qwen3_5")))
    assert other == "binding_mismatch"


@pytest.mark.parametrize(
    "options",
    [
        ["--accept", "--model", "x"],
        ["--artifact", "FILE"],
        ["--artifact", "FILE", "--model", "x", "--chunk", "256"],
        ["--artifact", "FILE", "--all-architectures"],
    ],
)
def test_a_file_is_computed_again_with_a_model_only(cli, options, tmp_path):
    (tmp_path / "FILE").touch()
    named = [str(tmp_path / one) if one == "FILE" else one for one in options]
    assert cli.run("selfcheck", *named).exit_code == 2


@pytest.mark.parametrize("key", ["", "ab", "0" * 64, "ed25519:" + "0" * 64])
def test_an_export_is_sealed_for_keys_only(cli, key, tmp_path):
    options = ("-o", str(tmp_path / "x"), "--to", key)
    result = cli.run("export", "Hi", *options)
    assert result.exit_code == 2
    assert "kvport keys recipient" in result.stderr


def test_export_to_standard_output_is_imported_from_standard_input(pair, prompt):
    server, other = pair
    server.run("complete", prompt, *ROOM)
    exported = server.run("export", prompt, "-o", "-")
    assert exported.exit_code == 0, exported.stderr
    assert "exported" in exported.stderr
    imported = other.run(
        "import", "-", "--model", "second", stdin=exported.stdout_bytes
    )
    assert imported.exit_code == 0, imported.output
    assert "imported" in imported.stdout
    probe = other.json("probe", prompt, "--model", "second")
    assert probe["restorable_tokens"] == len(prompt) - 1


def test_trust_counts_from_the_next_import_on(server, other_server, prompt, tmp_path):
    server.run("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    server.json("export", prompt, "-o", str(file))
    importing = ["import", str(file), "--model", "first"]
    assert other_server.refusal(*importing) == "untrusted_key"
    shown = server.json("keys", "show")
    other_server.json("trust", "add", "--yes", shown["public_key"], "--name", "server")
    other_server.json(*importing)
    other_server.json("trust", "remove", shown["key_id"])
    assert other_server.refusal(*importing) == "untrusted_key"


def test_export_of_what_was_never_computed_leaves_no_file(server, prompt, tmp_path):
    file = tmp_path / "prefix.kvport"
    assert server.refusal("export", prompt, "-o", str(file)) == "never_computed"
    assert not list(tmp_path.iterdir())


def test_export_says_how_much_of_the_prompt_it_carries(server, prompt, tmp_path):
    server.run("complete", prompt, *ROOM)
    file = str(tmp_path / "prefix.kvport")
    # The reply continued the prompt, so that the prompt's last token is here too.
    whole = server.run("export", prompt, "-o", file)
    tokens = len(prompt)
    assert f"exported {tokens} of {tokens} prompt tokens" in whole.stdout
    assert whole.stderr == ""
    longer = prompt + "and nobody has computed this"
    part = server.run("export", longer, "-o", file)
    carried = server.json("export", longer, "-o", file)
    assert carried["prompt_tokens"] == len(longer)
    assert f"{carried['restorable_tokens']} of {len(longer)} prompt" in part.stdout
    assert "never computed here" in part.stderr


def test_export_of_less_than_is_wanted_leaves_no_file(server, prompt, tmp_path):
    server.run("complete", prompt, *ROOM)
    args = ["export", prompt + "more", "-o", str(tmp_path / "x"), "--min-tokens"]
    assert server.refusal(*args, str(len(prompt) + 3)) == "not_restorable"
    assert not list(tmp_path.iterdir())
    server.json(*args, "1")


@pytest.mark.parametrize("output", ["missing/x.kvport", "."])
def test_export_to_no_file_is_refused_by_its_name(server, output, prompt, tmp_path):
    server.run("complete", prompt, *ROOM)
    named = f"{tmp_path}/{output}"
    assert server.refusal("export", prompt, "-o", named) == "local_file"
    said = server.run("export", prompt, "-o", named).stderr
    assert said.startswith(f"error[local_file]: {Path(named)}: ")


def test_the_prompt_of_one_dash_is_standard_input(server, prompt):
    piped = server.json("complete", "-", *ROOM, stdin=prompt.encode())
    assert piped["prompt_tokens"] == len(prompt)


def test_export_to_standard_output_has_no_room_for_json(server, prompt):
    assert server.run("export", prompt, "-o", "-", "--json").exit_code == 2


def test_import_of_a_damaged_file_is_refused(server, prompt, tmp_path):
    server.run("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    server.json("export", prompt, "-o", str(file))
    file.write_bytes(file.read_bytes()[:-1])
    assert server.refusal("import", str(file)) == "container"
    assert f"]: {file}: " in server.run("import", str(file)).stderr
    assert server.refusal("import", str(tmp_path / "missing")) == "local_file"


def test_probe_tells_what_a_policy_would_restore(server, prompt):
    server.run("complete", prompt, *ROOM)
    assert server.json("probe", prompt, "--policy", "exact")["restorable_tokens"] == 0
    near = server.json("probe", prompt, "--policy", "nearest")
    assert near["restorable_tokens"] == len(prompt) - 1


def test_stats_add_up_to_a_walk_of_the_directory(server, prompt):
    server.run("complete", prompt, *ROOM)
    server.run("probe", prompt)  # waits for what is being stored
    found = server.json("cache", "stats")
    cache = found["cache"]
    assert found["cap_bytes"] == 256 << 20
    assert found["total_bytes"] == walk(server.home / "cache")
    rows = [one["bytes"] for one in cache["namespaces"]]
    assert sum(rows) + sum(cache["beside"].values()) == found["total_bytes"]
    assert found["used_percent"] == pytest.approx(
        100 * found["total_bytes"] / found["effective_cap_bytes"], abs=0.01
    )
    assert "llama" in {one["model"] for one in cache["namespaces"]}
    shown = server.run("cache", "stats").stdout
    assert "of 256.0 MiB (" in shown
    held, counted = (part.splitlines() for part in shown.split("\n\n")[0:4:3])
    *names, index, overhead, total = [line.split()[0] for line in held[1:]]
    assert "llama" in names
    assert (index, overhead, total) == ("(index)", "(overhead)", "total")
    assert counted[0].split()[:4] == ["model", "namespace", "hits", "misses"]
    assert any(line.startswith("llama ") for line in counted[1:])
    assert "model llama" in shown


def test_a_namespace_of_two_names_shows_both(other_server):
    cache = other_server.json("cache", "stats")["cache"]
    assert [one["model"] for one in cache["namespaces"]] == ["first, second"]


def test_models_lists_what_is_served(server, other_server):
    (model,) = server.json("models", "list")["models"]
    off = {"refusal": None, "state": "on", "drafted": False, "keep_alive": None}
    assert model == {"name": "llama", "cached": True, **off}
    names = [one["name"] for one in other_server.json("models", "list")["models"]]
    assert names == ["first", "second"]
    assert "first" in other_server.run("models", "list").stdout


def test_models_are_loaded_and_unloaded(server, model_dir):
    loaded = server.json(
        *("models", "load", str(model_dir("qwen3_5"))),
        *("--name", "extra", "--keep-alive", "1h"),
    )
    assert (loaded["name"], loaded["keep_alive"]) == ("extra", 3600)
    assert "  1h\n" in server.run("models", "list").stdout
    args = ("models", "load", str(model_dir("llama")), "--name", "extra")
    assert server.refusal(*args) == "model_loaded"
    gone = server.json("models", "unload", "extra")
    assert gone["model"] == "extra"
    assert gone["weight_bytes"] > 0
    assert server.refusal("models", "unload", "extra") == "model_unloaded"
    again = server.run("models", "load", str(model_dir("llama")), "--name", "extra")
    assert again.exit_code == 0
    assert "extra is loaded (cache on)" in again.stderr
    assert "weights are free" in server.run("models", "unload", "extra").stderr


def test_min_tokens_above_the_prompt_is_a_mistake_of_the_request(server, tmp_path):
    file = str(tmp_path / "x")
    asked = ("export", "short", "-o", file, "--min-tokens", "5000")
    assert server.refusal(*asked) == "bad_request"
    assert "above the" in server.run(*asked).stderr


def test_a_file_that_is_missing_is_said_before_all_else(cli):
    for command in (
        ["import", "nofile"],
        ["verify", "nofile"],
        ["convert", "nofile", "--model", "x", "-o", "y"],
    ):
        assert cli.refusal(*command) == "local_file"


def test_models_that_were_unloaded_are_listed(server, model_dir):
    server.run("models", "load", str(model_dir("llama")), "--name", "brief",
               "--keep-alive", "5m")  # fmt: skip
    assert "5m" in server.run("models", "list").stdout
    server.run("models", "unload", "brief")
    listed = server.run("models", "list")
    assert "brief" not in listed.stdout
    assert "brief was unloaded at" in listed.stderr
    assert "brief" in {m["name"] for m in server.json("models", "list")["unloaded"]}


def test_a_server_without_models_says_which_it_had(tmp_path, model_dir):
    cli = Cli(tmp_path / "home")
    with starting_server(cli.home, [str(model_dir("llama"))]) as process:
        process.await_ready()
        cli.run("models", "unload", "llama")
        assert cli.refusal("complete", "x") == "no_model"
        assert "llama was unloaded at" in cli.run("complete", "x").stderr


def test_a_server_with_two_models_wants_a_name(other_server, prompt):
    assert other_server.refusal("probe", prompt) == "model_not_named"


def test_an_unknown_model_is_refused(server, prompt):
    assert server.refusal("complete", prompt, "--model", "bogus") == "unknown_model"


def test_without_a_server_the_refusal_says_so(cli, prompt):
    assert cli.refusal("cache", "artifacts") == "no_home"
    assert cli.refusal("complete", prompt) == "no_server"
    said = cli.run("complete", prompt).stderr
    assert f"no server runs on the home {cli.home}" in said
    assert f"kvport serve --model DIR --home {cli.home}" in said


def test_the_key_is_not_shown_to_the_server_of_another_home(server, other_server):
    url = running(other_server.home).url
    assert server.refusal("cache", "stats", "--url", url) == "wrong_server"
    own = running(server.home).url
    assert server.json("cache", "stats", "--url", own)


def test_a_server_elsewhere_is_called_with_its_key_alone(
    cli, server, tmp_path, monkeypatch
):
    there = ["models", "list", "--url", running(server.home).url]
    key = Keyring(server.home).api_key()
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    listed = server.json("models", "list")
    assert cli.json(*there, "--api-key-file", str(file)) == listed
    monkeypatch.setenv("KVPORT_API_KEY", key)
    assert cli.json(*there) == listed
    monkeypatch.setenv("KVPORT_API_KEY", "x" * 43)
    assert cli.refusal(*there) == "unauthorized"
    monkeypatch.setenv("KVPORT_API_KEY", "two words")
    assert cli.refusal(*there) == "local_file"
    missing = str(tmp_path / "missing")
    assert cli.refusal(*there, "--api-key-file", missing) == "local_file"


def test_ctrl_c_in_the_middle_of_a_reply_ends_the_line(server, prompt):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvport.api", "complete", prompt),
            *("--home", str(server.home), "--max-tokens", "4000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, words = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert (begun + rest).endswith(b"\n")
    assert words == b"interrupted\n"


def test_a_closed_port_is_unreachable(server):
    url = "http://127.0.0.1:9"
    assert server.refusal("cache", "stats", "--url", url) == "unreachable"


def test_a_terminal_shows_progress_and_standard_output_stays_clean(
    server, prompt, tmp_path
):
    server.run("complete", prompt, *ROOM)
    file = tmp_path / "prefix.kvport"
    terminal, stderr = pty.openpty()
    exporting = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvport.api", "export", prompt, "-o", str(file)),
            *("--home", str(server.home), "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(stderr)
    out, _ = exporting.communicate()
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert b"export" in shown
    assert json.loads(out)["size_bytes"] == file.stat().st_size
    assert server.run("export", prompt, "-o", str(file)).stderr == ""
