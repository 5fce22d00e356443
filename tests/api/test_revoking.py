"""Two homes that never met, pair, and fall out: what came of a revoked key is gone."""

import io
import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvport.api.cli.commands import root
from kvport.api.problems import ProblemError
from kvport.manifest.canonical import strict_loads
from kvport.manifest.envelope import open_envelope
from kvport.manifest.errors import RevokedKeyError
from kvport.manifest.identity import fingerprint
from kvport.manifest.model import Manifest
from kvport.manifest.trust import Revocation
from kvport.manifest.ustar import EntryData, EntryFinished, Reader
from kvport.snapshot.errors import GoneError
from kvport.snapshot.known_roots import KnownRoots
from kvport.snapshot.offline import opened
from tests.api.conftest import Running, running, trust
from tests.transfer.world import NOW

NAME = "llama"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed begins with."""
    return [seed + 1, *(1 + (7 * n + seed) % 250 for n in range(length - 1))]


def kvport(home: Path, *args: str) -> dict:
    """What a command prints with --json, which must succeed."""
    done = CliRunner().invoke(root, [*args, "--home", str(home), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def pair(here: Path, there: Path) -> str:
    """Trust a home's key by the fingerprint that it shows; answers the key id."""
    shown = kvport(there, "keys", "show")
    return kvport(
        here, "trust", "add", shown["public_key"],
        "--name", "there", "--fingerprint", shown["fingerprint"],
    )["key_id"]  # fmt: skip


def answer(server: Running, tokens: list[int], **options):
    return server.client.complete(
        NAME, tokens=tokens, ignore_eos=True, **{"max_tokens": 24, **options}
    )


def refusal(call, *args, **options) -> str:
    with pytest.raises(ProblemError) as refused:
        call(*args, **options)
    return refused.value.problem.code


def files(server: Running) -> set[Path]:
    """Files of blobs below the cache's root."""
    return {p for p in (server.home / "cache" / "ns").rglob("*") if p.is_file()}


def origins(server: Running) -> set[str]:
    """Keys that anything in the index is said to come from."""
    index = server.node.volume.cache._index
    rows = index.all("SELECT origins FROM claim WHERE n IN (SELECT claim FROM attest)")
    return {key for (text,) in rows for key in text.split()}


def manifest_of(data: bytes) -> Manifest:
    reader, envelope = Reader(), bytearray()
    for event in reader.feed(data[: 1 << 20]):
        if isinstance(event, EntryData):
            envelope += event.data
        elif isinstance(event, EntryFinished):
            break
    return Manifest.from_json(strict_loads(open_envelope(bytes(envelope)).payload))


def stored(server: Running, tokens: list[int]) -> int:
    return server.client.probe(NAME, tokens=tokens).stored_tokens


@pytest.fixture
def homes(tmp_path, models):
    """Two servers that never met."""
    with (
        running(tmp_path / "a", models[0]) as a,
        running(tmp_path / "b", models[0]) as b,
    ):
        yield a, b


def test_never_met_refused_paired_accepted_revoked_gone(homes, tmp_path):
    a, b = homes
    file, tokens, own = tmp_path / "a.kvport", prompt(600), prompt(300, seed=5)
    answer(a, tokens)
    imported = a.client.export(NAME, file, tokens=tokens).artifact_id
    assert refusal(b.client.import_, file) == "untrusted_key"

    key = pair(b.home, a.home)
    answer(b, own)
    mine = b.client.keep(NAME, tokens=own).artifact_id
    before = files(b)
    assert b.client.import_(file).restored_tokens == 600
    # A reply on top, stored and exported; some of it still waits in memory.
    longer = [*tokens, *answer(b, tokens, pin={"owner": "z", "seconds": 99}).tokens]
    more = [*longer, *prompt(300, seed=9)]
    on_top = answer(b, more)
    assert on_top.cached_tokens > 600
    derived = io.BytesIO()
    b.client.export(NAME, derived, tokens=more)
    assert key in manifest_of(derived.getvalue()).origins
    kept = b.client.keep(NAME, tokens=more).artifact_id
    answer(b, more)  # whose end is in memory only
    assert {one.artifact_id for one in b.client.artifacts()} == {imported, kept, mine}

    done = kvport(b.home, "trust", "revoke", "there", "--reason", "lost laptop")

    assert done["key_id"] == key
    assert done["cache"]["removed_segments"] > 3
    assert done["forgotten_artifacts"] == 2
    assert files(b) == before
    assert origins(b) == {b.node.key_id}
    for gone in (tokens, more, longer):
        assert stored(b, gone) == 0
    for artifact in (imported, kept):
        assert refusal(b.client.artifact, artifact) == "artifact_unknown"
        assert refusal(b.client.download, artifact, io.BytesIO()) == "artifact_unknown"
    exported = refusal(b.client.export, NAME, io.BytesIO(), tokens=more)
    assert exported == "state_revoked"
    assert refusal(b.client.import_, file) == "revoked_key"
    # What B made itself is as it was, and what it makes from now on is its own.
    assert [one.artifact_id for one in b.client.artifacts()] == [mine]
    b.client.download(mine, io.BytesIO())
    assert answer(b, own).cached_tokens == 299
    reasons = b.client.stats()["cache"]["total"]["removed"]
    assert reasons == {"revoked": done["cache"]["removed_segments"]}
    assert answer(b, more).cached_tokens == 0
    again = io.BytesIO()
    b.client.export(NAME, again, tokens=more)
    assert manifest_of(again.getvalue()).origins == {b.node.key_id}


def test_a_running_request_on_revoked_state_ends_and_others_go_on(homes, tmp_path):
    a, b = homes
    file, tokens = tmp_path / "a.kvport", prompt(600)
    answer(a, tokens)
    a.client.export(NAME, file, tokens=tokens)
    pair(b.home, a.home)
    b.client.import_(file)
    asked = {"ignore_eos": True, "max_tokens": 60_000}
    tainted = b.client.stream(NAME, tokens=tokens, **asked)
    clean = b.client.stream(NAME, tokens=prompt(40, seed=3), max_tokens=600)
    assert next(tainted).tokens is not None
    ended: list[str] = []

    def read() -> None:
        try:
            for _ in tainted:
                pass
        except ProblemError as error:
            ended.append(error.problem.code)

    reading = threading.Thread(target=read)
    reading.start()
    next(clean)
    done = kvport(b.home, "trust", "revoke", "there")
    assert done["ended_requests"] == 1
    reading.join(30)
    assert ended == ["state_revoked"]
    assert sum(len(delta.tokens or ()) for delta in clean) > 0
    assert stored(b, tokens) == 0
    b.node.volume.cache.flush()
    assert origins(b) <= {b.node.key_id}


def test_an_export_that_is_being_sent_breaks_off(homes, tmp_path):
    a, b = homes
    file, tokens = tmp_path / "a.kvport", prompt(600)
    answer(a, tokens)
    a.client.export(NAME, file, tokens=tokens)
    key = pair(b.home, a.home)
    b.client.import_(file)
    export = b.node.export(NAME, tokens)
    pieces = export.stream()
    next(pieces)
    kvport(b.home, "trust", "revoke", key)
    with pytest.raises(GoneError):
        list(pieces)


def test_an_import_under_way_does_not_outlast_the_revocation(homes, tmp_path):
    a, b = homes
    file, tokens = tmp_path / "a.kvport", prompt(600)
    answer(a, tokens)
    a.client.export(NAME, file, tokens=tokens)
    key = pair(b.home, a.home)
    taking = b.node.start_import()
    taking.feed(file.read_bytes())
    kvport(b.home, "trust", "revoke", key)
    with pytest.raises(RevokedKeyError):
        taking.finish()
    assert stored(b, tokens) == 0
    assert b.client.artifacts() == ()


def test_a_start_purges_what_the_list_revokes(tmp_path, models):
    """A crash between the list and the purge; then without a server."""
    file, tokens = tmp_path / "a.kvport", prompt(600)
    with running(tmp_path / "a", models[0]) as a:
        answer(a, tokens)
        a.client.export(NAME, file, tokens=tokens)
        with running(tmp_path / "b", models[0]) as b:
            trust(b, a)
            b.client.import_(file)
            key = a.node.key_id
            # As the command does, but without what comes after it.
            b.node.keyring.revoke(Revocation(key_id=key, at=NOW))
            assert stored(b, tokens) == 600
        with running(tmp_path / "b", models[0]) as b:
            assert stored(b, tokens) == 0
            assert files(b) == set()
            assert b.client.artifacts() == ()


def test_without_a_server_the_command_purges_itself(tmp_path, models):
    file, tokens = tmp_path / "a.kvport", prompt(600)
    with running(tmp_path / "a", models[0]) as a:
        answer(a, tokens)
        a.client.export(NAME, file, tokens=tokens)
        with running(tmp_path / "b", models[0]) as b:
            trust(b, a)
            b.client.import_(file)
            home = b.home
        done = kvport(home, "trust", "revoke", fingerprint(a.node.key_id))
    assert done["cache"]["removed_segments"] == 4
    assert done["forgotten_artifacts"] == 1
    with opened(home, KnownRoots(home).to_open(None)) as orders:
        assert orders.stats().account.blobs == 0


def test_a_key_that_nobody_listed_can_be_revoked(homes):
    a, b = homes
    shown = kvport(a.home, "keys", "show")
    for name in (shown["public_key"], shown["key_id"]):
        done = kvport(b.home, "trust", "revoke", name, "--reason", "heard of it")
        assert done["key_id"] == shown["key_id"]
    (one,) = kvport(b.home, "trust", "list")["revoked"]
    assert (one["key_id"], one["reason"]) == (shown["key_id"], "heard of it")
    args = ["trust", "add", shown["public_key"], "--name", "a", "--yes", "--json"]
    done = CliRunner().invoke(root, [*args, "--home", str(b.home)])
    assert json.loads(done.stdout)["code"] == "revoked_key"
