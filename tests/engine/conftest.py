"""An engine with one model on a cache in a temporary directory."""

import queue
import time
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvport.manifest.identity import PointKind
from kvport.manifest.keys import SigningKey
from kvport.manifest.tokens import encode_tokens
from kvport.snapshot.cache.cache import Cache, Opening
from kvport.snapshot.cache.clock import SYSTEM, Clocks
from kvport.snapshot.cache.records import Selection
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.requests import Failed, Generated, Request, Started
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.volume import Volume


@attrs.define
class Answer:
    """All events of one request."""

    restored: int | None = None
    tokens: list[int] = attrs.Factory(list)
    text: str = ""
    rows: list[np.ndarray] = attrs.Factory(list)
    finish: str | None = None
    ended: object = None

    @property
    def logprobs(self) -> np.ndarray:
        return np.stack(self.rows)


class Running:
    """A submitted request; `answer()` waits for its end."""

    def __init__(self, engine: Engine, name: str, request: Request):
        self.events = queue.SimpleQueue()
        self.ticket = engine.submit(name, request, self.events.put)
        self._answer = Answer()
        self.began = time.monotonic()

    @property
    def answer_so_far(self) -> Answer:
        return self._answer

    def next(self):
        event = self.events.get(timeout=3600)
        match event:
            case Started(restored=restored):
                self._answer.restored = restored
            case Generated():
                self._answer.tokens.append(event.token)
                self._answer.text += event.text
                self._answer.rows.append(event.full)
                self._answer.finish = event.finish
                if event.finish is not None:
                    self._answer.ended = event
            case _:
                self._answer.ended = event
        return event

    def answer(self) -> Answer:
        while self._answer.ended is None:
            self.next()
        if isinstance(self._answer.ended, Failed):
            raise self._answer.ended.error
        return self._answer


class Rig:
    """Engine, cache and one model called `m`."""

    def __init__(
        self,
        root: Path,
        model: Path,
        tuning: Tuning,
        key: SigningKey,
        *,
        block: int,
        clocks: Clocks,
    ):
        self.root, self.key = root, key
        self.block = block
        self.closed = False
        self.local = key.public.key_id
        self.cache_root = root / "cache"
        opening = Opening(root=self.cache_root, free_floor=0, clocks=clocks)
        self.cache = Cache.open(opening)
        self.engine = Engine(tuning)
        self.files = FileDigests(root / "digests.json")
        try:
            self.load("m", model)
        except BaseException:
            self.close()
            raise

    def load(self, name: str, directory: Path, **options):
        def store(model):
            if model.identity is None:
                return None
            namespace = self.cache.namespace(model.identity, "default", self.block)
            volume = Volume.holding(self.cache)
            return Store(volume=volume, namespace=namespace, local=self.local)

        return self.engine.load(name, directory, self.files, store, **options)

    @property
    def namespace(self):
        return self.engine.store("m").namespace

    def start(self, tokens, name="m", **options) -> Running:
        options = {"max_tokens": 4, "ignore_eos": True, **options}
        return Running(self.engine, name, Request(tokens=tokens, **options))

    def complete(self, tokens, **options) -> Answer:
        return self.start(tokens, **options).answer()

    def points(self, tokens) -> dict[int, set[PointKind]]:
        """Points stored on the longest path of these tokens."""
        match = self.match(tokens)
        nodes = match.nodes if match else ()
        ends = len(tokens)
        return {n.end: set(n.kinds) for n in nodes if n.kinds and n.end <= ends}

    def match(self, tokens, **options):
        if not self.closed:
            self.engine.store_tails("m")
        chosen = Selection(limit=len(tokens), local=self.local, **options)
        return self.cache.match(self.namespace, encode_tokens(tokens), chosen)

    def close(self):
        if not self.closed:
            self.closed = True
            self.engine.close()
            self.cache.close()


@pytest.fixture
def rig(tmp_path, model_dir):
    """Open rigs; the same `home` name opens the same cache again."""
    opened, keys = [], {}

    def open_rig(
        model="llama",
        home="a",
        chunk=512,
        stride=4096,
        block=256,
        *,
        clocks=SYSTEM,
        **tuning,
    ):
        directory = model if isinstance(model, Path) else model_dir(model)
        (tmp_path / home).mkdir(exist_ok=True)
        key = keys.setdefault(home, SigningKey.generate())
        settings = Tuning(chunk=chunk, stride=stride, **tuning)
        made = Rig(
            tmp_path / home, directory, settings, key, block=block, clocks=clocks
        )
        opened.append(made)
        return made

    yield open_rig
    for made in opened:
        made.close()


@pytest.fixture
def prompt():
    """Random token ids, reproducible by seed."""

    def make(length, seed=0, vocabulary=300):
        return np.random.default_rng(seed).integers(1, vocabulary, length).tolist()

    return make
