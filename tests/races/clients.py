"""What one client may do, at random, and what it may be told.

Each operation has a list of the refusals that are in order while others clear, evict,
unload and set quotas. All else is a failure: other codes, and errors that are not ours.
"""

import contextlib
import math
import random
from collections.abc import Callable

import attrs
import msgspec

from kvport.api.admin_bodies import (
    ClearBody,
    NamespaceBody,
    PlanBody,
    ReleaseBody,
    ScrubBody,
)
from kvport.api.client import Client
from kvport.api.errors import IncompleteError
from kvport.api.problems import ProblemError
from kvport.manifest.layout import BlobClass
from kvport.snapshot.cache.policy import Tier
from tests.races.talks import Talk
from tests.races.world import GUEST, Answered, Torn, TornError, World

_ABSENT = {"unknown_model", "model_unloaded"}
_ARTIFACT = {"artifact_unknown", "artifact_gone"}
_TAKEN = {"gone", "evicted", "never_computed", "not_restorable"}
# A cut end is stored, and so is what is admitted.
_ROOM = {"capacity", "quota", "namespace_tier", "write_budget"}

ALLOWED: dict[str, set[str]] = {
    "complete": set(),
    # Where nothing is stored at present.
    "pinned": {"namespace_tier"},
    "exact": set(),
    "from_artifact": _ARTIFACT,
    "hang_up": set(),
    "guest": _ABSENT,
    "probe": set(),
    "export": _TAKEN | _ROOM | {"incomplete"},
    "keep": _TAKEN | _ROOM | _ARTIFACT | {"incomplete"},
    "torn_export": _TAKEN | _ROOM,
    "import": _ROOM | {"overloaded", "gone"},
    "torn_import": _ROOM | {"overloaded", "gone"},
    "load": _ABSENT,
    "unload": _ABSENT,
    "stats": set(),
    "metrics": set(),
    "artifacts": _ARTIFACT,
    "configure": {"unknown_namespace"},
    "plan": set(),
    "gc": set(),
    "clear": {"unknown_namespace"} | _ARTIFACT,
    "holds": set(),
    "scrub": set(),
}  # fmt: skip
"""Codes by operation."""

_WEIGHTS = {
    "complete": 26, "pinned": 4, "exact": 16, "from_artifact": 4, "hang_up": 3,
    "guest": 5, "probe": 4, "export": 6, "keep": 3, "torn_export": 1, "import": 6,
    "torn_import": 1, "load": 3, "unload": 1, "stats": 2, "metrics": 1,
    "artifacts": 1, "configure": 4, "plan": 2, "gc": 1, "clear": 3, "holds": 2,
    "scrub": 1,
}  # fmt: skip


class Storming:
    """One client; `step` does one thing."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.world = world
        self.rng = random.Random(f"{seed}/{number}")
        self.number = number
        self.client = Client.for_home(world.home)
        self.last = "nothing"

    def step(self) -> None:
        """Do something; what comes back is in order, or this raises."""
        (name,) = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        self.last = name
        work: Callable[[], None] = getattr(self, f"_{name}")
        try:
            work()
        except (ProblemError, IncompleteError) as error:
            if error.code not in ALLOWED[name]:
                raise
            self.world.count(name, error.code)
        else:
            self.world.count(name, "done")

    # Completions.

    def _complete(self) -> None:
        options: dict = {}
        if self.rng.random() < 0.15:
            options["read"] = False
        if self.rng.random() < 0.15:
            options["write"] = False
        elif self.rng.random() < 0.2:
            options["ttl"] = self.rng.choice([1, 2, 60])
        self._answer(self.world.talks.next(self.rng), **options)

    def _pinned(self) -> None:
        seconds = self.rng.choice([1, 2, 5])
        pin = {"owner": f"client {self.number}", "seconds": seconds}
        self._answer(self.world.talks.next(self.rng), pin=pin)

    def _exact(self) -> None:
        self._answer(self.world.talks.next(self.rng), policy="exact")

    def _from_artifact(self) -> None:
        if (found := self.world.an_artifact(self.rng)) is not None:
            ident, talk = found
            self._answer(talk, artifact=ident)

    def _answer(self, talk: Talk, **options) -> None:
        count = self.rng.randrange(1, 9)
        answer = self.client.complete(
            talk.model,
            tokens=list(talk.tokens),
            max_tokens=count,
            temperature=0,
            logprobs=1,
            ignore_eos=True,
            **options,
        )
        assert len(answer.tokens) == len(answer.logprobs) == count
        assert answer.prompt_tokens == len(talk.tokens)
        assert 0 <= answer.cached_tokens < answer.prompt_tokens
        assert options.get("read", True) or not answer.cached_tokens
        assert all(math.isfinite(one) and one <= 1e-6 for one in answer.logprobs)
        exact = options.get("policy") == "exact"
        self.world.answered.append(Answered(talk, answer, exact))
        if talk.model != GUEST:
            self.world.talks.add(
                attrs.evolve(talk, tokens=(*talk.tokens, *answer.tokens))
            )

    def _hang_up(self) -> None:
        talk = self.world.talks.next(self.rng)
        reply = self.client.stream(
            talk.model, tokens=list(talk.tokens), max_tokens=200, ignore_eos=True
        )
        for _ in range(self.rng.randrange(4)):
            next(reply)
        reply.close()

    def _guest(self) -> None:
        self._answer(attrs.evolve(self.world.talks.new(self.rng), model=GUEST))

    def _load(self) -> None:
        keep = self.rng.choice([None, 1, 60])
        self.client.load_model(str(self.world.guest), name=GUEST, keep_alive=keep)

    def _unload(self) -> None:
        self.client.unload_model(GUEST, force=self.rng.random() < 0.5)

    # Transfer.

    def _talk(self) -> Talk:
        talks = self.world.talks
        return talks.known(self.rng) or talks.new(self.rng)

    def _probe(self) -> None:
        talk = self._talk()
        policy = self.rng.choice(["nearest", "exact"])
        found = self.client.probe(talk.model, tokens=list(talk.tokens), policy=policy)
        assert found.restorable_tokens < found.prompt_tokens == len(talk.tokens)

    def _export(self) -> None:
        talk = self._talk()
        # Names come again: what is being imported meanwhile is another file then.
        path = self.world.files / f"{self.number}-{self.rng.randrange(3)}.kvport"
        made = self.client.export(
            talk.model,
            path,
            tokens=list(talk.tokens),
            compress=self.rng.random() < 0.3,
        )
        assert path.stat().st_size == made.size_bytes
        self.world.exported(path, talk)

    def _keep(self) -> None:
        talk = self._talk()
        kept = self.client.keep(talk.model, tokens=list(talk.tokens))
        path = self.world.files / f"{self.number}-kept.kvport"
        self.client.download(kept.artifact_id, path)
        self.world.exported(path, talk)
        self.world.admitted(kept.artifact_id, talk)

    def _torn_export(self) -> None:
        talk = self._talk()
        torn = Torn(after=self.rng.randrange(1 << 16))
        with contextlib.suppress(TornError):
            self.client.export(talk.model, torn, tokens=list(talk.tokens))

    def _import(self) -> None:
        if (file := self.world.a_file(self.rng)) is not None:
            found = self.client.import_(file.path)
            assert found.model == file.talk.model
            assert found.restored_tokens > 0
            self.world.admitted(found.artifact_id, file.talk)

    def _torn_import(self) -> None:
        if (file := self.world.a_file(self.rng)) is not None:
            data = file.path.read_bytes()
            torn = Torn(data, after=self.rng.randrange(len(data)))
            with contextlib.suppress(TornError):
                self.client.import_(torn)

    def _artifacts(self) -> None:
        for one in self.client.artifacts()[:3]:
            if one.direction == "exported":
                self.client.artifact(one.artifact_id)

    # Numbers.

    def _stats(self) -> None:
        found = self.client.stats()
        assert found["total_bytes"] <= found["cap_bytes"]
        held = sum(one["bytes"] for one in found["cache"]["namespaces"])
        assert held <= found["total_bytes"]

    def _metrics(self) -> None:
        response = self.client._http.get("/metrics")
        assert response.status_code == 200
        assert b"kvport_cache" in response.content

    # Orders.

    def _which(self) -> str:
        return self.rng.choice(["llama", "qwen3_5", GUEST])

    def _configure(self) -> None:
        rng, which = self.rng, self._which()
        changes: list[dict] = [
            {"quota_bytes": rng.choice([2 << 20, 5 << 20, 1 << 30])},
            {"quota_bytes": None},
            {"ttl": rng.choice([1, 3, 3600])},
            {"ttl": None},
            {"tier": rng.choice(list(Tier))},
            # More often than not, state is stored.
            *[{"tier": None}] * 4,
            {"retention": {"newest": 128, "every": 256, "prompts": 2}},
            {"retention": None},
            {"reclaim_on_unload": rng.random() < 0.5},
            {"write_bytes_per_hour": rng.choice([1, 1 << 30])},
            *[{"write_bytes_per_hour": None}] * 2,
        ]
        self.client.admin.set_namespace(
            NamespaceBody(namespace=which, **rng.choice(changes))
        )
        found = self.client.admin.namespaces()
        assert {one["model"] for one in found["namespaces"]} >= {"llama", "qwen3_5"}

    def _plan(self) -> None:
        cap = self.rng.choice([None, 4 << 20, 6 << 20])
        found = self.client.admin.plan(
            PlanBody(cap_bytes=cap, quotas={"llama": self.rng.choice([None, 1 << 20])})
        )
        assert found["bytes"] >= 0

    def _gc(self) -> None:
        assert self.client.admin.gc()["freed_bytes"] >= 0

    def _clear(self) -> None:
        rng = self.rng
        artifact = self.world.an_artifact(rng)
        bodies = [
            ClearBody(namespace=self._which()),
            ClearBody(kind=rng.choice(list(BlobClass))),
            ClearBody(kind=BlobClass.STATE, namespace="qwen3_5"),
            ClearBody(older_than=rng.choice([1, 3])),
            ClearBody(all=True),
        ]
        if artifact is not None:
            bodies += [ClearBody(artifact=artifact[0])] * 2
        body = rng.choice(bodies)
        if rng.random() < 0.3:
            body = msgspec.structs.replace(body, force=True)
        assert self.client.admin.clear(body)["freed_bytes"] >= 0

    def _holds(self) -> None:
        for pin in self.client.admin.pins()["pins"][:2]:
            self.client.admin.release(
                ReleaseBody(owner=pin["owner"], node=pin["node"][:12])
            )

    def _scrub(self) -> None:
        if self.rng.random() < 0.5:
            self.client.admin.start_scrub(ScrubBody(bytes_per_second=8 << 20))
        else:
            self.client.admin.stop_scrub()
        assert self.client.admin.scrub()["damaged"] == 0
