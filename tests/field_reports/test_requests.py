"""Reports B30 to B33: what happens between a request's end and the disk."""

import errno
import os
import time

import pytest

from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import GIB
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.engine.requests import Cancelled, Request, Started
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.node import Node, NodeSettings
from tests.cache.builder import blob_files, check_account
from tests.engine.conftest import Running

SMALL = {"chunk": 64, "stride": 128, "block": 64}


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that takes its time with every file."""
    real = os.fsync

    def fsync(fd):
        time.sleep(0.02)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text", "mamba2"])
def test_b30_the_same_prompt_three_times_is_restored_each_time(rig, prompt, arch):
    """Hybrids, whose state is not rows: from memory, from disk, after a restart."""
    tokens = prompt(900)
    r = rig(arch, **SMALL)
    assert [r.complete(tokens).restored for _ in range(3)] == [0, 899, 899]
    counts = r.engine.counts["m"]
    assert (counts.hits, counts.misses, counts.failed_captures) == (2, 1, 0)
    r.close()
    r = rig(arch, **SMALL)
    assert r.complete(tokens).restored == 899
    assert not r.cache.stats().total.skipped


def test_b30_what_was_not_kept_is_counted(rig, prompt, failing_fsync):
    tokens = prompt(300)
    r = rig("qwen3_5", **SMALL)
    with failing_fsync(errno.EIO):
        r.complete(tokens)
        r.cache.flush()
    assert r.cache.stats().total.skipped[SkipReason.STORAGE] > 0
    assert [r.complete(tokens).restored for _ in range(2)] == [0, 299]


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_b31_cancelled_in_prefill_with_a_slow_disk(rig, prompt, slow_disk, steps):
    """No error, no file of no use, the account as the disk has it."""
    r = rig("qwen3_5", **SMALL)
    tokens = prompt(3000)
    running = r.start(tokens)
    while steps and not isinstance(running.next(), Started):
        pass
    for _ in range(steps):
        r.engine.call(lambda: None)
    running.ticket.cancel()
    assert isinstance(running.answer().ended, Cancelled)
    r.cache.flush()
    stats = r.cache.stats()
    assert (stats.leases, stats.total.skipped) == (0, {})
    known = {
        digest.hex() for (digest,) in r.cache._index.all("SELECT digest FROM file")
    }
    assert blob_files(r.cache_root) == known
    assert not list(r.cache_root.glob("staging/*"))
    check_account(r.cache, r.cache_root)
    captured = r.match(tokens)
    again = r.complete(tokens)
    assert again.restored == (captured.position if captured else 0)


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_b32_a_prompt_right_after_the_first_is_restored(rig, prompt, slow_disk, pause):
    """The second waits for what the first has queued, however slow the disk is."""
    r = rig("qwen3_5", **SMALL)
    tokens = prompt(900)
    assert r.complete(tokens, max_tokens=1).restored == 0
    time.sleep(pause)
    assert r.complete(tokens, max_tokens=1).restored == 899


def test_b33_an_export_drains_what_waits_in_memory(tmp_path, model_dir, prompt):
    """A hot conversation, nothing of whose reply is on the disk yet."""
    tuning = Tuning(chunk=256, stride=256, reply_idle=3600.0)
    settings = NodeSettings(home=tmp_path / "home", cap_bytes=GIB, tuning=tuning)
    with Node.open(settings) as node:
        node.load_model(str(model_dir("qwen3_5")), "m")
        running = Running(
            node.engine,
            "m",
            Request(tokens=prompt(700), max_tokens=40, ignore_eos=True),
        )
        whole = prompt(700) + running.answer().tokens
        before = node.volume.cache.stats().total.written[BlobClass.STATE]
        export = node.export("m", [*whole, 1])
        try:
            assert export.restorable_tokens == len(whole)
            assert sum(map(len, export.stream())) > 0
        finally:
            export.close()
        assert node.volume.cache.stats().total.written[BlobClass.STATE] > before
