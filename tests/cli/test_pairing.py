"""`kvport trust add`: who says whose key it is; and documents between homes."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvport.manifest.keys import SigningKey

HERE = Path(__file__).parents[2]


@pytest.fixture
def other(cli):
    """The command line of a home that never met ours."""
    found = type(cli)(cli.home.with_name("other"))
    found.run("keys", "init")
    return found


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Puts an `ssh` on PATH that runs this script, and notes its arguments."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)

    def make(script: str) -> Path:
        said = tmp_path / "said"
        program = directory / "ssh"
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n[ "$1" = "--" ] && shift 2\n'
            f"{script}\n"
        )
        program.chmod(0o755)
        return said

    return make


def on(home: Path) -> str:
    """A script that runs the command on another home, as over there."""
    return f'shift; KVPORT_HOME={home} exec {sys.executable} -m kvport.api "$@"'


def trusted(cli) -> dict[str, dict]:
    return {entry["name"]: entry for entry in cli.json("trust", "list")["trust"]}


def test_without_a_terminal_someone_must_have_compared(cli, other):
    key = other.json("keys", "show")["public_key"]
    done = cli.run("trust", "add", key, "--name", "b", "--json")
    assert done.exit_code == 2
    assert "--fingerprint or --yes" in json.loads(done.stdout)["detail"]
    assert not cli.home.exists()


@pytest.mark.parametrize("spaced", [True, False])
def test_the_fingerprint_is_compared(cli, other, spaced):
    shown = other.json("keys", "show")
    digits = shown["fingerprint"]
    given = digits if spaced else digits.replace(" ", "").upper()
    add = ["trust", "add", shown["public_key"], "--name", "b", "--fingerprint"]
    assert cli.json(*add, given)["key_id"] == shown["key_id"]


def test_another_keys_fingerprint_is_refused(cli, other):
    key = SigningKey.generate().public.raw.hex()
    shown = other.json("keys", "show")["fingerprint"]
    add = ["trust", "add", key, "--name", "b", "--fingerprint", shown]
    assert cli.refusal(*add) == "fingerprint"
    # Whoever says both must not be wrong in one.
    assert cli.refusal(*add, "--yes") == "fingerprint"
    assert not cli.home.exists()
    done = cli.run("trust", "add", key, "--name", "b", "--fingerprint", "abcd")
    assert done.exit_code == 2


@pytest.mark.parametrize(("reply", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_on_a_terminal_it_shows_the_fingerprint_and_asks(cli, other, reply, code):
    shown = other.json("keys", "show")
    terminal, end = pty.openpty()
    os.write(terminal, reply)
    command = [
        *(sys.executable, "-m", "kvport.api", "trust", "add", shown["public_key"]),
        *("--name", "b", "--home", str(cli.home)),
    ]
    done = subprocess.run(
        command, stdin=end, capture_output=True, text=True, check=False
    )
    os.close(end)
    os.close(terminal)
    assert done.returncode == code, done.stderr
    assert shown["fingerprint"] in done.stderr
    assert "print the same on the other machine?" in done.stderr
    cli.run("keys", "init")
    assert ("b" in trusted(cli)) == (code == 0)


def test_over_ssh_the_other_home_tells_its_key(cli, other, ssh):
    said = ssh(on(other.home))
    added = cli.json("trust", "add", "me@mac-b", "--name", "mac-b")
    assert added["key_id"] == other.json("keys", "show")["key_id"]
    assert said.read_text().split() == [
        *("--", "me@mac-b", "kvport", "keys", "show", "--json"),
    ]
    assert trusted(cli)["mac-b"] == added


def test_over_ssh_a_given_fingerprint_is_compared(cli, other, ssh):
    ssh(on(other.home))
    cli.run("keys", "init")
    own = cli.json("keys", "show")["fingerprint"]
    add = ["trust", "add", "me@mac-b", "--name", "b", "--fingerprint", own]
    assert cli.refusal(*add) == "fingerprint"


@pytest.mark.parametrize(
    "script",
    [
        "exit 255",
        "echo",
        "echo nonsense",
        "yes",
        'echo "{}"',
        """echo '{"fingerprint":"","key_id":"","public_key":"00"}'""",
        "printf '%s' '[[[['",
    ],
)
def test_what_is_no_answer_is_refused(cli, ssh, script):
    ssh(script)
    assert cli.refusal("trust", "add", "me@mac-b", "--name", "b") == "pairing"
    assert not cli.home.exists()


def test_the_status_of_ssh_is_told(cli, ssh):
    ssh("exit 7")
    done = cli.run("trust", "add", "me@mac-b", "--name", "b")
    assert "status 7" in done.stderr


def test_names_that_are_not_the_keys_are_refused(cli, other, ssh):
    shown = other.json("keys", "show")
    cli.run("keys", "init")
    for name in ("key_id", "fingerprint"):
        lie = shown | {name: cli.json("keys", "show")[name]}
        ssh(f"echo '{json.dumps(lie)}'")
        assert cli.refusal("trust", "add", "me@mac-b", "--name", "b") == "pairing"
    ssh(f"echo '{json.dumps(shown | {'more': 1})}'")
    assert cli.refusal("trust", "add", "me@mac-b", "--name", "b") == "pairing"


def test_without_ssh_it_says_so(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.refusal("trust", "add", "me@mac-b", "--name", "b") == "pairing"


@pytest.mark.parametrize(
    "address", ["-oProxyCommand=x@h", "me@-x", "@h", "me@", "a b@h", "me@h;id", "a@b@c"]
)
def test_an_address_that_ssh_would_take_for_something_else_is_refused(
    cli, ssh, address
):
    said = ssh("exit 0")
    done = cli.run("trust", "add", "--name", "b", "--", address)
    assert done.exit_code == 2
    assert not said.exists()


# Documents.


def signing(cli, *args: str) -> dict:
    """Give the home's own key the role, as an operator does."""
    key = cli.json("keys", "show")["public_key"]
    roles = ("--role", "export", "--role", "trust")
    return cli.json("trust", "add", key, "--name", "ops", *roles, "--yes", *args)


@pytest.fixture
def operator(cli):
    """An operator's home, whose key `cli` believes in scope `default`."""
    found = type(cli)(cli.home.with_name("operator"))
    found.run("keys", "init")
    signing(found)
    cli.run("keys", "init")
    key = found.json("keys", "show")["public_key"]
    limits = ("--role", "trust", "--scope", "default")
    cli.json("trust", "add", key, "--name", "ops", *limits, "--yes")
    return found


def test_what_the_operator_trusts_the_others_trust(cli, operator, other, tmp_path):
    file = str(tmp_path / "a.kvtrust")
    key = other.json("keys", "show")["public_key"]
    operator.json("trust", "add", key, "--name", "mac-c", "--yes")
    signed = operator.json("trust", "documents", "sign", "-o", file)["document"]
    assert signed["version"] == 1
    applied = cli.json("trust", "documents", "apply", file)
    assert applied["document"] == signed
    assert cli.json("trust", "documents", "apply", file)["document"] is None
    found = cli.json("trust", "list")
    (given,) = found["given"]
    assert (given["name"], given["scopes"], given["roles"]) == (
        "mac-c", ["default"], ["export"],
    )  # fmt: skip
    shown = cli.run("trust", "list").stdout
    assert "mac-c" in shown
    assert "ops may sign trust documents." in shown
    assert cli.run("trust", "documents", "apply", file).exit_code == 0

    again = str(tmp_path / "b.kvtrust")
    operator.json("trust", "remove", "mac-c")
    operator.json("trust", "documents", "sign", "-o", again, "--expires", "1d")
    cli.json("trust", "documents", "apply", again)
    assert cli.json("trust", "list")["given"] == []
    assert cli.refusal("trust", "documents", "apply", file) == "rollback"


def test_what_the_operator_revokes_the_others_revoke(cli, operator, other, tmp_path):
    file = str(tmp_path / "a.kvtrust")
    shown = other.json("keys", "show")
    operator.json("trust", "revoke", shown["public_key"], "--reason", "lost")
    operator.run("trust", "documents", "sign", "-o", file)
    applied = cli.json("trust", "documents", "apply", file)
    assert applied["newly_revoked"] == 1
    assert applied["revoked_keys"] == 1
    (one,) = cli.json("trust", "list")["revoked"]
    assert (one["key_id"], one["reason"]) == (shown["key_id"], "lost")
    assert shown["fingerprint"] in cli.run("trust", "list").stdout
    add = ["trust", "add", shown["public_key"], "--name", "c", "--yes"]
    assert cli.refusal(*add) == "revoked_key"
    # Another machine's document, on the one that it revokes.
    key = operator.json("keys", "show")["public_key"]
    other.json("trust", "add", key, "--name", "ops", "--role", "trust", "--yes")
    assert other.refusal("trust", "documents", "apply", file) == "own_key"


def test_only_chosen_keys_are_given(operator, other, tmp_path):
    for name in ("one", "two"):
        key = SigningKey.generate().public.raw.hex()
        operator.json("trust", "add", key, "--name", name, "--yes")
    file = str(tmp_path / "a.kvtrust")
    sign = ["trust", "documents", "sign", "-o", file]
    signed = operator.json(*sign, "--entry", "two")["document"]
    assert [entry["name"] for entry in signed["entries"]] == ["two"]
    names = {e["name"] for e in operator.json(*sign)["document"]["entries"]}
    assert names == {"one", "two"}
    assert operator.refusal(*sign, "--entry", "three") == "not_listed"


def test_documents_need_the_role_on_both_sides(cli, operator, other, tmp_path):
    file = str(tmp_path / "a.kvtrust")
    assert other.refusal("trust", "documents", "sign", "-o", file) == "untrusted_key"
    operator.run("trust", "documents", "sign", "-o", file)
    assert other.refusal("trust", "documents", "apply", file) == "untrusted_key"
    Path(file).write_bytes(b"x" * 10)
    assert cli.refusal("trust", "documents", "apply", file) == "format"
    Path(file).write_bytes(b"x" * (1 << 20))
    assert cli.refusal("trust", "documents", "apply", file) == "format"
    missing = str(tmp_path / "none")
    assert cli.refusal("trust", "documents", "apply", missing) == "local_file"


def test_a_home_cannot_revoke_its_own_key(cli):
    cli.run("keys", "init")
    assert cli.refusal("trust", "revoke", "this node") == "own_key"
    assert cli.refusal("trust", "revoke", "nobody") == "not_listed"
    reason = ["--reason", "\x1b[2J"]
    assert cli.run("trust", "revoke", f"ed25519:{'00' * 32}", *reason).exit_code == 2
