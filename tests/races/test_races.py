"""Sixteen clients and the command line do everything at once, on one server."""

import queue
import random
import re
from pathlib import Path

import attrs
import pytest
from structlog.testing import capture_logs

from kvport.api.admin_bodies import NamespaceBody, ReleaseBody
from kvport.api.client import Client
from kvport.manifest.limits import MIB
from kvport.manifest.trust import TrustEntry
from kvport.snapshot.engine.requests import Generated, Request
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.namespaces import Change
from kvport.snapshot.node import Node, NodeSettings
from tests.cache.builder import check_account, walk
from tests.races.oracle import Oracle
from tests.races.storm import quiet, storm
from tests.races.talks import Talks
from tests.races.world import GUEST, File, World
from tests.server_process import running_server

CAP = 6 * MIB
CHUNK = 64
"""So small that short prompts have many segments and points."""
ARCHES = {"llama": "llama", "qwen3_5": "qwen3_5", GUEST: "gemma3_text"}
_DEFECTS = re.compile(
    r"Traceback|engine_defect|cache_writer_defect|request_failed|engine_failure"
    r"|index_lost|row_not_ours|damaged|close_failed|gave_up"
)


def settings(home: Path) -> NodeSettings:
    tuning = Tuning(chunk=CHUNK, stride=CHUNK)
    return NodeSettings(
        home=home, cap_bytes=CAP, free_floor=0, block_size=CHUNK, tuning=tuning
    )


def foreign_files(node: Node, talks: Talks, directory: Path, rng) -> list[File]:
    """What another home has computed, in files."""
    made = []
    for _ in range(6):
        talk = talks.new(rng)
        events = queue.SimpleQueue()
        request = Request(tokens=talk.tokens, max_tokens=3, ignore_eos=True)
        node.submit(talk.model, request, events.put)
        while not isinstance(event := events.get(timeout=60), Generated) or (
            event.finish is None
        ):
            continue
        path = directory / f"foreign-{len(made)}.kvport"
        export = node.export(talk.model, talk.tokens)
        try:
            path.write_bytes(b"".join(export.stream()))
        finally:
            export.close()
        made.append(File(path, talk))
    return made


def calm(client: Client, talks: Talks, rng: random.Random) -> None:
    """As if nothing had been: what was asked before restores."""
    # Pins may hold half of the cap, and with the longest talks that is too much.
    for owner in {one["owner"] for one in client.admin.pins()["pins"]}:
        client.admin.release(ReleaseBody(owner=owner))
    for name in ("llama", "qwen3_5"):
        nothing = dict.fromkeys(Change.__struct_fields__)
        client.admin.set_namespace(NamespaceBody(namespace=name, **nothing))
    for _ in range(6):
        talk = talks.next(rng)
        asked = {"tokens": list(talk.tokens), "max_tokens": 4, "ignore_eos": True}
        client.complete(talk.model, **asked)
        again = client.complete(talk.model, **asked)
        assert again.cached_tokens == again.prompt_tokens - 1


def check(
    tmp_path: Path, model_dir, *, seed: int, seconds: float, answers: int
) -> None:
    home, files = tmp_path / "home", tmp_path / "files"
    home.mkdir(mode=0o700)
    files.mkdir()
    rng = random.Random(seed)
    models = {name: model_dir(arch) for name, arch in ARCHES.items()}
    talks = Talks(seed, ("llama", "qwen3_5"))
    keyring = Keyring(home)
    keyring.create()
    with Node.open(settings(tmp_path / "other")) as other:
        for name in ("llama", "qwen3_5"):
            other.load_model(str(models[name]), name)
        foreign = foreign_files(other, talks, files, rng)
        public = other.keyring.signing_key().public
        keyring.add(TrustEntry(public_key=public, name="other"))
    world = World(
        home=home,
        files=files,
        guest=models[GUEST],
        talks=talks,
        foreign=tuple(foreign),
    )

    options = (
        *("--cap", "6MiB", "--free-floor", "0", "--block-size", str(CHUNK)),
        *("--chunk", str(CHUNK), "--stride", str(CHUNK)),
    )
    resident = [models["llama"], models["qwen3_5"]]
    with running_server(home, *resident, options=options) as process:
        weather = storm(world, seed=seed, seconds=seconds)
        print(f"seed {seed}:", *sorted(world.counts.items()), sep="\n  ")
        assert not weather.failures, "\n".join(weather.failures)
        with Client.for_home(home) as client:
            calm(client, talks, rng)
            numbers = quiet(client)
        assert numbers["total_bytes"] == walk(home / "cache")
        process.terminate()
        assert process.wait(60) == 0
    log = (home / "server.log").read_text()
    assert not _DEFECTS.search(log), log[-5000:]

    # It really was about the limits.
    assert weather.commands >= 2
    assert max(weather.samples) <= CAP
    assert max(weather.samples) > 0.5 * CAP
    assert sum(numbers["cache"]["total"]["removed"].values()) > 20

    with capture_logs() as logs:
        node = Node.open(settings(home))
    with node:
        # What has expired since goes at the start; a sweep finds nothing.
        told = [one for one in logs if one["log_level"] != "info"]
        assert {one["event"] for one in told} <= {"cache_removal_planned"}, told
        assert {one["reason"] for one in told} <= {"expired"}, told
        check_account(node.volume.cache, home / "cache")
        for name, directory in models.items():
            node.load_model(str(directory), name)
        oracle = Oracle(node)
        restored = [one for one in world.answered if one.answer.cached_tokens]
        chosen = rng.sample(restored, min(answers, len(restored)))
        oracle.check_answers(chosen, rng)
        with pytest.raises(AssertionError):
            # It tells the states of other prompts apart.
            oracle.check_answers([attrs.evolve(chosen[0], talk=talks.new(rng))], rng)
        points, cold = oracle.check_stored()
        print(f"{len(chosen)} answers, {points} points, {cold} of them cold")
        assert len(chosen) > 20
        assert points > 20


def test_sixteen_clients_and_the_command_line(tmp_path, model_dir):
    check(tmp_path, model_dir, seed=1, seconds=10, answers=60)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sixteen_clients_for_five_minutes(tmp_path, model_dir):
    check(
        tmp_path,
        model_dir,
        seed=random.SystemRandom().randrange(1 << 32),
        seconds=300,
        answers=2000,
    )
