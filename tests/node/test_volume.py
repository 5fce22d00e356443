"""A node whose cache goes and comes back: what requests and transfers see of it."""

import contextlib
import queue
import time

import numpy as np
import pytest

from kvport.manifest.trust import TrustEntry
from kvport.snapshot.engine.requests import Failed, Generated, Request, Started
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import CacheAbsentError, KvportError
from kvport.snapshot.node import Node, NodeSettings
from kvport.snapshot.volume import VolumeState

PROMPT = np.random.default_rng(0).integers(1, 300, 700).tolist()


class Running:
    """A node with one model, whose cache is on a volume of its own."""

    def __init__(self, tmp_path, model, name="a"):
        self.model = model
        self.volume = tmp_path / f"volume-{name}"
        self.away = tmp_path / f"away-{name}"
        self.root = self.volume / "cache"
        self.home = tmp_path / f"home-{name}"
        self.volume.mkdir()
        self.node = None

    def open(self):
        tuning = Tuning(chunk=256, stride=256, reply_idle=0.05)
        settings = NodeSettings(
            home=self.home,
            cache_root=self.root,
            cap_bytes=1 << 28,
            free_floor=0,
            tuning=tuning,
        )
        self.node = Node.open(settings)
        self.node.load_model(str(self.model), "m")

    def close(self):
        if self.node is not None:
            self.node.close()
            self.node = None

    def go(self):
        self.volume.rename(self.away)

    def come(self):
        self.away.rename(self.volume)
        self.until(VolumeState.OK)

    def until(self, state):
        end = time.monotonic() + 30
        while self.node.health().state is not state:
            self.node.volume.suspect()
            assert time.monotonic() < end, self.node.health()
            time.sleep(0.01)

    def start(self, tokens, **options):
        events = queue.SimpleQueue()
        request = Request(tokens=tokens, **{"max_tokens": 4, **options})
        self.node.submit("m", request, events.put)
        return events

    def complete(self, tokens, **options):
        """Tokens restored, and those of the reply."""
        return ended(self.start(tokens, ignore_eos=True, **options))


def ended(events):
    restored, reply = None, []
    while True:
        match events.get(timeout=120):
            case Started(restored=restored):
                pass
            case Generated(token=token, finish=finish):
                reply.append(token)
                if finish is not None:
                    return restored, reply
            case Failed(error=error):
                raise error


@pytest.fixture
def nodes(tmp_path, model_dir):
    made = []

    def make(name="a"):
        made.append(Running(tmp_path, model_dir("llama"), name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_requests_go_on_without_the_cache_and_restore_when_it_is_back(nodes):
    here = nodes()
    here.open()
    restored, reply = here.complete(PROMPT)
    assert restored == 0
    assert here.complete(PROMPT) == (699, reply)
    here.go()
    here.until(VolumeState.ABSENT)
    assert here.complete(PROMPT) == (0, reply)
    other = [7, *PROMPT]
    assert here.complete(other)[0] == 0
    assert not here.volume.exists()
    here.come()
    assert here.complete(PROMPT) == (699, reply)
    assert here.complete(other)[0] == 0
    assert here.complete(other)[0] == 700


def test_a_volume_that_goes_in_the_middle_of_a_reply_does_not_end_it(nodes):
    here = nodes()
    here.open()
    _, reply = here.complete(PROMPT, max_tokens=60)
    events = here.start([*PROMPT], max_tokens=60, ignore_eos=True, read=False)
    seen = [events.get(timeout=120) for _ in range(10)]
    here.go()
    # Before the monitor has looked, and after.
    rest = ended(events)[1]
    tokens = [one.token for one in seen if isinstance(one, Generated)]
    assert [*tokens, *rest] == reply
    assert here.complete([8, *PROMPT])[0] == 0
    here.until(VolumeState.ABSENT)
    here.come()
    assert here.complete(PROMPT)[0] == 699


def test_b26_a_model_that_was_loaded_without_the_cache_uses_it_later(nodes):
    here = nodes()
    here.open()
    _, reply = here.complete(PROMPT)
    here.close()
    here.go()
    here.open()
    assert here.node.health().state is VolumeState.ABSENT
    assert here.complete(PROMPT) == (0, reply)
    here.come()
    assert here.complete(PROMPT) == (699, reply)


def test_a_node_that_ends_without_its_volume_ends(nodes):
    here = nodes()
    here.open()
    here.complete(PROMPT)
    here.node.volume.cache.flush()
    here.go()
    here.complete([7, *PROMPT])
    here.close()
    assert not here.volume.exists()
    here.away.rename(here.volume)
    here.open()
    assert here.complete(PROMPT)[0] == 699


def test_a_cache_that_comes_back_is_no_load_of_the_model(nodes):
    def loaded():
        (one,) = here.node.volume.cache.administration.namespaces()
        return one.loaded

    here = nodes()
    here.open()
    before = loaded()
    here.go()
    here.until(VolumeState.ABSENT)
    time.sleep(1.1)
    here.come()
    assert loaded() == before > 0


def absent(call):
    with pytest.raises(CacheAbsentError) as error:
        call()
    assert error.value.code == "cache_absent"


def exported(node):
    return b"".join(node.export("m", PROMPT).stream())


@pytest.mark.parametrize("seen", [True, False])
def test_transfers_say_that_the_cache_is_absent(nodes, seen):
    here = nodes()
    here.open()
    here.complete(PROMPT)
    opened = here.node.export("m", PROMPT)
    here.node.artifacts.keep(opened)
    here.go()
    if seen:
        here.until(VolumeState.ABSENT)
    absent(lambda: b"".join(opened.stream()))
    absent(lambda: exported(here.node))
    absent(lambda: b"".join(here.node.artifacts.reopen(opened.artifact_id).stream()))
    here.until(VolumeState.ABSENT)
    absent(lambda: here.node.path_of(opened.artifact_id))
    absent(lambda: here.node.probe("m", Request(tokens=PROMPT, max_tokens=1)))
    absent(here.node.start_import)
    assert [one.stored for one in here.node.artifacts.all()] == [False]
    here.come()
    assert [one.stored for one in here.node.artifacts.all()] == [True]
    assert b"".join(here.node.artifacts.reopen(opened.artifact_id).stream())


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.7, 1])
def test_an_import_whose_volume_goes_leaves_nothing_half_visible(nodes, share, seen):
    there, here = nodes("there"), nodes("here")
    there.open()
    there.complete(PROMPT)
    data = exported(there.node)
    here.open()
    public = there.node.keyring.signing_key().public
    here.node.keyring.add(TrustEntry(public_key=public, name="there"))
    coming = here.node.start_import()
    cut = round(share * len(data))
    coming.feed(data[:cut])
    here.go()
    if seen:
        here.until(VolumeState.ABSENT)

    def rest():
        if data[cut:]:
            coming.feed(data[cut:])
        coming.finish()

    absent(rest)
    here.until(VolumeState.ABSENT)
    here.come()
    assert not list((here.root / "staging").iterdir())
    assert not here.node.artifacts.all()
    probe = Request(tokens=PROMPT, max_tokens=1)
    assert here.node.probe("m", probe).stored_tokens == 0
    again = here.node.start_import()
    again.feed(data)
    assert again.finish().restored_tokens == 700
    with contextlib.suppress(KvportError):
        again.abort()
