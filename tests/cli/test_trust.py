"""`kvport keys` and `kvport trust`."""

import json
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


@pytest.mark.parametrize("args", [["list"], ["remove", "bob"]])
def test_there_is_no_trust_list_without_a_home(cli, args):
    assert cli.refusal("trust", *args) == "no_home"
    assert str(cli.home) in cli.run("trust", *args).stderr
    assert not cli.home.exists()


def test_the_fingerprint_is_the_same_wherever_it_is_shown(cli, other):
    cli.run("keys", "init")
    shown = cli.json("keys", "show")["fingerprint"]
    assert trusted(cli)["this node"]["fingerprint"] == shown
    assert shown in cli.run("trust", "list").stdout


def test_the_public_key_alone_is_what_trust_add_takes(cli, tmp_path):
    cli.run("keys", "init")
    key = cli.run("keys", "show", "--public-key").stdout
    assert key == cli.json("keys", "show")["public_key"] + "\n"
    elsewhere = type(cli)(tmp_path / "elsewhere")
    added = elsewhere.json("trust", "add", "--yes", key, "--name", "here")
    assert added["fingerprint"] == cli.json("keys", "show")["fingerprint"]


def test_the_table_of_trusted_keys_fits_a_terminal(cli, other):
    cli.run("trust", "add", "--yes", other, "--name", "bob")
    assert all(len(line) <= 80 for line in cli.run("trust", "list").stdout.splitlines())


@pytest.mark.parametrize("field", ["key_id", "fingerprint"])
def test_trust_add_of_what_names_a_key_says_what_is_wanted(cli, field):
    cli.run("keys", "init")
    result = cli.run(
        "trust",
        "add",
        "--yes",
        cli.json("keys", "show")[field],
        "--name",
        "b",
        "--json",
    )
    assert result.exit_code == 2
    said = json.loads(result.stdout)["detail"]
    assert "PUBLIC_KEY" in said
    assert "64 hex digits that `kvport keys show` prints" in said
    assert f"that is a {field.replace('_', ' ')}" in said


@pytest.mark.parametrize("form", ["key_id", "fingerprint", "unspaced", "name"])
def test_trust_remove_takes_whatever_names_the_key(cli, other, form):
    added = cli.json("trust", "add", "--yes", other, "--name", "bob")
    added["unspaced"] = added["fingerprint"].replace(" ", "").upper()
    removed = cli.json("trust", "remove", added[form])
    assert removed == {"key_id": added["key_id"]}
    assert trusted(cli).keys() == {"this node"}


def test_trust_remove_of_a_name_that_two_keys_have_is_refused(cli, other):
    cli.run("trust", "add", "--yes", other, "--name", "bob")
    another = SigningKey.generate().public.raw.hex()
    cli.run("trust", "add", "--yes", another, "--name", "bob")
    assert cli.refusal("trust", "remove", "bob") == "not_listed"
    assert len(cli.json("trust", "list")["trust"]) == 3


def test_trust_add_is_seen_until_removed(cli, other):
    cli.run("keys", "init")
    added = cli.json("trust", "add", "--yes", other, "--name", "bob")
    assert trusted(cli).keys() == {"this node", "bob"}
    assert trusted(cli)["bob"] == added
    assert "bob" in cli.run("trust", "list").stdout
    cli.json("trust", "remove", added["key_id"])
    assert trusted(cli).keys() == {"this node"}


def test_trust_add_restricts_scopes_models_and_time(cli, other):
    options = ["--scope", "team", "--scope", "a", "--model", "m", "--expires"]
    cli.json("trust", "add", "--yes", other, "--name", "bob", *options, "2190-01-31")
    entry = trusted(cli)["bob"]
    assert entry["scopes"] == ["a", "team"]
    assert entry["models"] == ["m"]
    assert entry["not_after"] == "2190-01-31T00:00:00Z"


def test_trust_add_of_the_same_key_replaces_its_entry(cli, other):
    cli.run("trust", "add", "--yes", other, "--name", "bob")
    cli.run("trust", "add", "--yes", other.upper(), "--name", "robert")
    assert "bob" not in trusted(cli)
    assert trusted(cli)["robert"]["public_key"] == other


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["zz", "--name", "bob"], "PUBLIC_KEY"),
        (["00" * 31, "--name", "bob"], "PUBLIC_KEY"),
        (["11" * 32], "--name"),
        (["11" * 32, "--name", "\x1b[31m"], "--name"),
        (["11" * 32, "--name", "bob", "--scope", "not a scope"], "--scope"),
        (["11" * 32, "--name", "bob", "--model", "*", "--model", "m"], "--model"),
        (["11" * 32, "--name", "bob", "--expires", "2001-01-01"], "--expires"),
        (["11" * 32, "--name", "bob", "--expires", "tomorrow"], "--expires"),
    ],
)
def test_trust_add_of_what_is_no_entry_is_wrong_usage(cli, args, hint):
    cli.run("keys", "init")
    before = (cli.home / "trust.json").read_bytes()
    result = cli.run("trust", "add", "--yes", *args, "--json")
    assert result.exit_code == 2
    assert hint in json.loads(result.stdout)["detail"]
    assert (cli.home / "trust.json").read_bytes() == before


def test_trust_add_of_a_weak_key_is_refused(cli):
    weak = "01" + "00" * 31
    assert cli.refusal("trust", "add", "--yes", weak, "--name", "bob") == "weak_key"


def test_trust_remove_of_an_unknown_key_is_refused(cli):
    cli.run("keys", "init")
    assert cli.refusal("trust", "remove", f"ed25519:{'00' * 32}") == "not_listed"
    assert cli.refusal("trust", "remove", "bob") == "not_listed"


def test_concurrent_trust_add_loses_no_entry(cli):
    cli.run("keys", "init")
    adding = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kvport.api", "trust", "add", "--yes"),
                SigningKey.generate().public.raw.hex(),
                *("--name", f"n{n}", "--home", str(cli.home)),
            ],
            stdout=subprocess.DEVNULL,
        )
        for n in range(6)
    ]
    assert [process.wait() for process in adding] == [0] * 6
    assert trusted(cli).keys() == {"this node", *(f"n{n}" for n in range(6))}
