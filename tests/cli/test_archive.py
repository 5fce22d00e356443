"""`kvport inspect` and `kvport verify`: files, with nothing but the file and a home."""

import subprocess
import sys
from datetime import UTC, datetime

import attrs
import pytest

from kvport.manifest.identity import fingerprint
from tests.manifest.builder import KEY, OTHER_KEY, ManifestBuilder

# Made in the past, and valid for as long as these tests may run.
ARTIFACT = ManifestBuilder(expires=datetime(2190, 1, 1, tzinfo=UTC))

WITHOUT_MLX = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"mlx", "mlx_lm", "litestar", "httpx", "numpy"}:
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Barred())
from kvport.api.cli import main
main(prog_name="kvport")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.kvport"
    path.write_bytes(ARTIFACT.container())
    return path


@pytest.fixture
def trusting(cli):
    """A command line whose home trusts the artifact's signer."""
    cli.run("trust", "add", "--yes", KEY.public.raw.hex(), "--name", "mac-a")
    return cli


def test_inspect_tells_what_the_file_says(cli, file):
    manifest = ARTIFACT.manifest()
    facts = cli.json("inspect", str(file))
    assert facts["artifact_id"].startswith("blake3:")
    assert facts["signers"] == [KEY.public.key_id]
    assert facts["origins"] == [KEY.public.key_id]
    assert facts["issuer"] == {"key_id": KEY.public.key_id, "name": "mac-a"}
    assert facts["tokens"] == 10
    assert facts["segments"] == 4
    assert facts["points"] == [
        {"position": 6, "kinds": ["fork"]},
        {"position": 10, "kinds": ["prompt", "stride"]},
    ]
    assert facts["lineage"] == {"cold": 4, "derived": 6}
    assert facts["layers"] == {"full": 1, "windowed": 1, "whole": 1}
    assert facts["identity"]["model_files"] == manifest.identity.model_files
    assert facts["expires"] == "2190-01-01T00:00:00Z"
    sizes: dict[str, int] = {}
    for part in (*manifest.segments, *manifest.points):
        for blob in part.blobs:
            sizes[blob.blob_class] = sizes.get(blob.blob_class, 0) + blob.size
    assert facts["bytes"] == sizes
    total = sum(sizes.values())
    assert facts["codecs"] == {
        "none": {"blobs": 10, "bytes": total, "encoded_bytes": total}
    }


def test_inspect_for_people_says_the_same(cli, file):
    result = cli.run("inspect", str(file))
    assert result.exit_code == 0
    facts = cli.json("inspect", str(file))
    for text in (
        facts["artifact_id"],
        fingerprint(KEY.public.key_id),
        "3: 1 attention, 1 sliding-window, 1 recurrent",
        "mlx-lm 0.32.2",
        "10 in 4 segments, blocks of 4",
        "6 (fork)",
        "4 from an empty cache, 6 continued",
        "mac-a",
        "2190-01-01T00:00:00Z",
    ):
        assert text in result.stdout
    assert "Nothing of this is verified" in result.stderr


def test_inspect_needs_no_trust_and_no_home(cli, file):
    cli.json("inspect", str(file))
    assert not cli.home.exists()


def test_inspect_reads_standard_input(cli, file):
    from_stdin = cli.json("inspect", "-", stdin=file.read_bytes())
    assert from_stdin == cli.json("inspect", str(file))


def test_inspect_leaves_out_what_is_not_said(cli, file):
    assert all(cli.json("inspect", str(file))["info"].values())


def test_inspect_compares_the_files_size_with_the_declared_one(cli, file):
    data = file.read_bytes()
    facts = cli.json("inspect", str(file))
    assert facts["complete"]
    assert facts["size_bytes"] == facts["declared_bytes"] == len(data)
    assert "bytes of" not in cli.run("inspect", str(file)).stderr
    for other, word in ((data[:-512], "cut short"), (data + b"x", "followed by")):
        file.write_bytes(other)
        for facts in (
            cli.json("inspect", str(file)),
            cli.json("inspect", "-", stdin=other),
        ):
            assert not facts["complete"]
            assert facts["size_bytes"] == len(other)
            assert facts["declared_bytes"] == len(data)
        assert word in cli.run("inspect", str(file)).stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_refused_file_is_named(trusting, file, command):
    file.write_bytes(b'[{"role": "user"}]' * 100)
    said = trusting.run(command, str(file)).stderr
    assert said.startswith(f"error[container]: {file}: ")
    said = trusting.run(command, "-", stdin=file.read_bytes()).stderr
    assert said.startswith("error[container]: standard input: ")


def test_inspect_refuses_what_is_no_container(cli, file):
    file.write_bytes(b"no container" * 100)
    assert cli.refusal("inspect", str(file)) == "container"
    file.write_bytes(b"")
    assert cli.refusal("inspect", str(file)) == "container"


def test_verify_passes_a_true_file_of_a_trusted_signer(trusting, file):
    facts = trusting.json("verify", str(file))
    assert facts["artifact_id"] == trusting.json("inspect", str(file))["artifact_id"]
    assert facts["size_bytes"] == file.stat().st_size
    assert trusting.json("verify", "-", stdin=file.read_bytes()) == facts
    assert facts["artifact_id"] in trusting.run("verify", str(file)).stdout


def test_verify_refuses_an_unknown_signer(cli, file):
    cli.run("keys", "init")
    assert cli.refusal("verify", str(file)) == "untrusted_key"


def test_verify_without_a_home_says_so(cli, file):
    assert cli.refusal("verify", str(file)) == "no_home"
    assert not cli.home.exists()


def test_verify_refuses_a_signer_that_was_removed(trusting, file):
    trusting.run("trust", "remove", KEY.public.key_id)
    assert trusting.refusal("verify", str(file)) == "untrusted_key"


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9, 0.999])
def test_verify_refuses_a_flipped_bit(trusting, file, at):
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
    file.write_bytes(data)
    assert trusting.run("verify", str(file)).exit_code == 1


def test_verify_refuses_a_file_cut_short(trusting, file):
    file.write_bytes(file.read_bytes()[:-512])
    assert trusting.refusal("verify", str(file)) == "container"


def test_verify_refuses_a_file_for_another_machine(trusting, file):
    other = attrs.evolve(ARTIFACT, audience=(OTHER_KEY.public.key_id,))
    file.write_bytes(_container(other))
    assert trusting.refusal("verify", str(file)) == "wrong_scope"


def test_a_directory_is_refused_by_name(cli, tmp_path):
    assert cli.refusal("inspect", str(tmp_path)) == "local_file"
    assert str(tmp_path) in cli.run("inspect", str(tmp_path)).stderr


def test_a_missing_file_is_refused_by_name(cli, tmp_path):
    missing = str(tmp_path / "missing.kvport")
    assert cli.refusal("inspect", missing) == "local_file"
    assert missing in cli.run("inspect", missing).stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_is_none_of_ours_is_called_so(trusting, tmp_path, command):
    log = tmp_path / "server.log"
    log.write_text("a line of a log\n" * 10)
    shown = trusting.run(command, str(log)).stderr
    assert "the file is no kvport artifact" in shown


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_it_works_where_nothing_heavy_can_be_imported(trusting, file, command):
    args = [command, str(file), *(["--home", str(trusting.home)] * (command[0] == "v"))]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MLX, *args],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "10 in 4 segments" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_enough_ends_it_without_a_word(trusting, file):
    code = "from kvport.api.cli import main; main(prog_name='kvport')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "inspect", str(file)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    words = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert b"Traceback" not in words
    assert b"BrokenPipe" not in words


def _container(artifact: ManifestBuilder) -> bytes:
    """The builder verifies what it packs, so it must be the audience itself."""
    envelope = artifact.signed()
    return attrs.evolve(artifact, audience=()).container(envelope)
