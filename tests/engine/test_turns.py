"""What a conversation costs: tokens computed again, bytes written, bytes kept."""

import json
import shutil
from itertools import pairwise

import pytest

from kvport.manifest.coverage import WindowCoverage
from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass

TURNS, TURN = 20, 300


class Conversation:
    """A prompt is all that was said before and a question, two thirds of the turn."""

    def __init__(self, rig, prompt, turn=TURN):
        self.rig = rig
        self.prompt = prompt
        self.answered = turn // 3
        self.asked = turn - self.answered
        self.said = []
        self.points = []
        self.turns = 0

    def turn(self):
        before = len(self.said)
        self.said += self.prompt(self.asked, seed=self.turns)
        answer = self.rig.complete(list(self.said), max_tokens=self.answered)
        assert answer.restored >= before - 1, "at most one token is computed again"
        self.points.append(len(self.said) - 1)
        self.said += answer.tokens
        self.turns += 1


def row_bytes(layout, blob_class):
    """Bytes of one more row, of as many rows as a window is long."""
    if not layout.has(blob_class):
        return 0
    derived = layout.blob(blob_class, 1)
    return derived.size - len(derived.header)


def needed_bytes(layout, rows, points):
    """All full rows, and what the restore points need: their states, their windows."""
    total = rows * row_bytes(layout, BlobClass.KV)
    if layout.has(BlobClass.STATE):
        total += len(points) * layout.blob(BlobClass.STATE, 1).size
    window = layout.max_window
    ranges = {row for p in points for row in range(max(0, p - window), p)}
    return total + len(ranges) * row_bytes(layout, BlobClass.WINDOW)


def written_by(rig):
    rig.engine.store_tails("m")
    rig.cache.flush()
    return sum(rig.cache.stats().total.written.values())


def allocated(rig):
    rig.cache.flush()
    return rig.cache.stats().account.blobs


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "arch",
    ["qwen3_5", "gemma3_text", pytest.param("baichuan_m1", marks=pytest.mark.soak)],
)
def test_b17_b18_twenty_turns(rig, prompt, arch, restart):
    """At most a token again, at most 5 % too many bytes, linear growth on disk.

    Written are the new full rows and one point a turn: a reply's end is written only if
    no next turn makes it needless, as before a restart.
    """
    stride = 8192  # a stride point would be a step in the growth
    r = rig(arch, stride=stride)
    talk = Conversation(r, prompt)
    written, kept, replies = 0, [], []
    for _ in range(TURNS):
        talk.turn()
        if restart:
            replies.append(len(talk.said))
            written += written_by(r)
            r.close()
            talk.rig = r = rig(arch, stride=stride)
        kept.append(allocated(r))
    (namespace,) = r.cache.stats().namespaces
    if (layout := r.engine.model("m").layout).has(BlobClass.STATE):
        # Without a moment's rest too: two prompts', and a reply's that restarts stored.
        assert namespace.kinds[BlobClass.STATE].files <= 3
    written += written_by(r)
    points = sorted({*talk.points, *replies, len(talk.said)})
    assert written <= 1.05 * needed_bytes(layout, len(talk.said), points)

    growth = [b - a for a, b in pairwise(kept)]
    assert sum(growth[10:]) <= 1.1 * sum(growth[:9]) * len(growth[10:]) / 9
    kinds = [kind for found in r.points(talk.said).values() for kind in found]
    assert kinds.count(PointKind.PROMPT) == kinds.count(PointKind.REPLY) == 1


def test_a_turn_of_a_deep_window_model_writes_a_third_of_a_boundary(
    rig, prompt, model_dir, tmp_path
):
    """52 window layers, as in Gemma 3 27B: rows, not whole windows.

    There windows have 1,024 rows, and a turn 300 tokens; here a quarter of either.
    """
    directory = tmp_path / "deep"
    shutil.copytree(model_dir("gemma3_text", layers=62), directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"sliding_window": 256, "sliding_window_pattern": 6}
    (directory / "config.json").write_text(json.dumps(config))
    small = {"block": 64, "chunk": 128, "stride": 1024}
    r = rig(directory, **small)
    layout = r.engine.model("m").layout
    assert sum(cache.window is not None for cache in layout.caches) == 52
    assert WindowCoverage.of(layout).window == 256

    talk = Conversation(r, prompt, TURN // 4)
    talk.said = prompt(280, seed=99)
    r.complete(list(talk.said), max_tokens=1)
    # Else its reply's end would be written whenever it has been idle long enough.
    r.engine.store_tails("m")
    r.cache.flush()
    boundary = 256 * row_bytes(layout, BlobClass.WINDOW)
    for _ in range(2):
        before = r.cache.stats().total.written[BlobClass.WINDOW]
        talk.turn()
        r.engine.store_tails("m")
        r.cache.flush()
        after = r.cache.stats().total.written[BlobClass.WINDOW]
        assert 0 < after - before <= 0.35 * boundary
    r.close()
    r = rig(directory, **small)
    assert r.complete([*talk.said, 5]).restored == len(talk.said)


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text"])
def test_retention_is_settable(rig, prompt, arch):
    """Three prompts and two replies instead of one each; all of them restore."""
    from kvport.snapshot.cache.retention import Retention

    r = rig(arch, retention=Retention(prompts=3, replies=2), reply_idle=0.0)
    talk, replies = Conversation(r, prompt), []
    for _ in range(6):
        talk.turn()
        replies.append(len(talk.said))
    r.engine.store_tails("m")
    points = r.points(talk.said)
    assert {p for p, k in points.items() if PointKind.PROMPT in k} == {
        *talk.points[-3:]
    }
    for position in (*talk.points[-3:], *replies[-2:]):
        asked = [*talk.said[:position], 1, 2]
        assert r.complete(asked, write=False).restored == position
