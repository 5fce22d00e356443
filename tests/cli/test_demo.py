"""`kvport demo`: with short prompts all of it, and that it leaves nothing running."""

import fcntl
import json
import signal
import subprocess
import sys

import attrs
import pytest

from kvport.api.cli import demo as command
from kvport.api.demo.conversation import long_prompt, next_turn
from kvport.api.demo.run import SUBJECTS, run
from kvport.api.demo.servers import ended_in_order
from kvport.api.run_file import running

FIELDS = {
    "model", "cold_ttft_s", "hot_ttft_s", "imported_ttft_s", "artifact_bytes",
    "export_s", "import_s", "prompt_tokens", "restored_tokens", "identical_to_hot",
    "max_diff_to_cold",
}  # fmt: skip


def test_the_demonstration_keeps_its_promises(cli, tmp_path, monkeypatch):
    short = [attrs.evolve(subject, characters=900) for subject in SUBJECTS]
    monkeypatch.setattr(command, "run", lambda work, say: run(work, say, short))
    kept = tmp_path / "kept"
    shown = cli.json("demo", "--keep", str(kept))["models"]
    assert [one["model"] for one in shown] == ["llama", "qwen3_5", "gemma3_text"]
    for one in shown:
        assert one.keys() >= FIELDS
        assert one["prompt_tokens"] > 900
        assert one["restored_tokens"] == one["prompt_tokens"] - 1
        assert one["identical_to_hot"] is True
        assert one["max_diff_to_cold"] < 1e-4
        work = kept / one["model"]
        file = work / f"{one['model']}.kvport"
        assert file.stat().st_size == one["artifact_bytes"]
        assert running(work / "a") is None
        assert running(work / "b") is None
    again = cli.run("demo", "--keep", str(kept))
    assert again.exit_code == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_demonstration_that_is_ended_ends_its_servers(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvport.api", "demo", "--keep", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        computing = next(line for line in process.stderr if "computes" in line)
        assert computing.startswith("llama")
        homes = [tmp_path / "llama" / name for name in "ab"]
        assert all(running(home) for home in homes)
        process.send_signal(number)
        out, words = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert out == ""
    assert "Traceback" not in words
    if number is signal.SIGKILL:
        # Nobody is left to wait for them: they see it and end by themselves.
        for home in homes:
            with (home / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        assert process.returncode == 128 + number
    assert not any(running(home) for home in homes)


def test_a_closed_terminal_ends_nothing_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_table_says_when_an_answer_differs(cli, monkeypatch):
    outcome = {
        "model": "llama", "cold_ttft_s": 2.0, "hot_ttft_s": 0.1, "import_s": 0.1,
        "imported_ttft_s": 0.1, "artifact_bytes": 2048, "export_s": 0.1,
        "prompt_tokens": 600, "restored_tokens": 599, "identical_to_hot": False,
        "max_diff_to_cold": 0.5, "next_turn_tokens": 700,
        "next_turn_restored_tokens": 632,
    }  # fmt: skip
    outcomes = [command.Outcome(**outcome)]
    monkeypatch.setattr(command, "run", lambda *_: outcomes)
    result = cli.run("demo")
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["identical", "to", "hot", "NO"] in rows
    assert ["file", "2.0", "KiB"] in rows
    as_json = cli.run("demo", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout) == {"models": [outcome]}


def test_the_document_has_the_length_that_was_asked_for():
    for characters in (1, 500, 4000):
        system, user = long_prompt(characters)
        assert system["role"] == "system"
        assert len(user["content"]) == characters + len("\n\nWhat does it say?")


def test_the_next_turn_continues_the_conversation():
    messages = long_prompt(10)
    following = next_turn(messages, "reply")
    assert following[:2] == messages
    assert [one["role"] for one in following[2:]] == ["assistant", "user"]
    assert following[2]["content"] == "reply"
