"""`kvport keys` and `kvport trust`."""

import subprocess
import sys

import pytest

from kvport.manifest.keys import SigningKey
from kvport.snapshot.keyring import Keyring


@pytest.fixture
def other() -> str:
    return SigningKey.generate().public.raw.hex()


def trusted(cli) -> dict[str, dict]:
    return {entry["name"]: entry for entry in cli.json("trust", "list")["trust"]}


def test_keys_init_makes_keys_once(cli):
    first = cli.json("keys", "init")
    assert cli.json("keys", "init") == first
    assert cli.json("keys", "show") == first
    assert first["public_key"] == Keyring(cli.home).signing_key().public.raw.hex()


def test_keys_show_prints_a_fingerprint_of_the_key_id(cli):
    cli.run("keys", "init")
    shown = cli.run("keys", "show").stdout
    key_id = cli.json("keys", "show")["key_id"]
    lines = dict(line.split("  ", 1) for line in shown.splitlines())
    digits = lines["fingerprint"].replace(" ", "")
    assert key_id.startswith(f"ed25519:{digits}")
    assert len(digits) == 32


def test_keys_show_makes_no_keys(cli):
    assert cli.refusal("keys", "show") == "no_home"
    assert not cli.home.exists()


def test_keys_init_below_a_file_is_refused(cli):
    cli.home.write_text("not a directory")
    assert cli.refusal("keys", "init", "--home", str(cli.home / "x")) == "local_file"


def test_keys_that_others_may_read_are_refused(cli):
    cli.run("keys", "init")
    (cli.home / "keys" / "signing.key").chmod(0o644)
    assert cli.refusal("keys", "show") == "key_file"


def test_the_private_key_is_never_printed(cli):
    cli.run("keys", "init")
    seed = Keyring(cli.home).signing_key().to_bytes().hex()
    for args in (["keys", "show"], ["keys", "init"], ["trust", "list"]):
        assert seed not in cli.run(*args).output


def test_trust_list_of_no_home_is_empty(cli):
    assert cli.json("trust", "list") == {"trust": []}


def test_trust_add_is_seen_until_removed(cli, other):
    cli.run("keys", "init")
    added = cli.json("trust", "add", other, "--name", "bob")
    assert trusted(cli).keys() == {"this node", "bob"}
    assert trusted(cli)["bob"] == added
    assert "bob" in cli.run("trust", "list").stdout
    cli.json("trust", "remove", added["key_id"])
    assert trusted(cli).keys() == {"this node"}


def test_trust_add_restricts_scopes_models_and_time(cli, other):
    options = ["--scope", "team", "--scope", "a", "--model", "m", "--expires"]
    cli.json("trust", "add", other, "--name", "bob", *options, "2190-01-31")
    entry = trusted(cli)["bob"]
    assert entry["scopes"] == ["a", "team"]
    assert entry["models"] == ["m"]
    assert entry["not_after"] == "2190-01-31T00:00:00Z"


def test_trust_add_of_the_same_key_replaces_its_entry(cli, other):
    cli.run("trust", "add", other, "--name", "bob")
    cli.run("trust", "add", other.upper(), "--name", "robert")
    assert "bob" not in trusted(cli)
    assert trusted(cli)["robert"]["public_key"] == other


@pytest.mark.parametrize(
    "args",
    [
        ["zz", "--name", "bob"],
        ["00" * 31, "--name", "bob"],
        ["11" * 32],
        ["11" * 32, "--name", "\x1b[31m"],
        ["11" * 32, "--name", "bob", "--scope", "not a scope"],
        ["11" * 32, "--name", "bob", "--model", "*", "--model", "m"],
        ["11" * 32, "--name", "bob", "--expires", "2001-01-01"],
        ["11" * 32, "--name", "bob", "--expires", "tomorrow"],
    ],
)
def test_trust_add_of_what_is_no_entry_is_wrong_usage(cli, args):
    cli.run("keys", "init")
    before = (cli.home / "trust.json").read_bytes()
    assert cli.run("trust", "add", *args).exit_code == 2
    assert (cli.home / "trust.json").read_bytes() == before


def test_trust_add_of_a_weak_key_is_refused(cli):
    weak = "01" + "00" * 31
    assert cli.refusal("trust", "add", weak, "--name", "bob") == "weak_key"


def test_trust_remove_of_an_unknown_key_is_refused(cli):
    cli.run("keys", "init")
    assert cli.refusal("trust", "remove", f"ed25519:{'00' * 32}") == "not_listed"
    assert cli.run("trust", "remove", "bob").exit_code == 2


def test_concurrent_trust_add_loses_no_entry(cli):
    cli.run("keys", "init")
    adding = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kvport.api", "trust", "add"),
                SigningKey.generate().public.raw.hex(),
                *("--name", f"n{n}", "--home", str(cli.home)),
            ],
            stdout=subprocess.DEVNULL,
        )
        for n in range(6)
    ]
    assert [process.wait() for process in adding] == [0] * 6
    assert trusted(cli).keys() == {"this node", *(f"n{n}" for n in range(6))}
