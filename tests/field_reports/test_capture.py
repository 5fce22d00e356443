"""Reports B01 to B12: state that was never captured, or was and did not come back.

B01, B03 in full depth: engine/test_hybrid48.py. B31, B32: engine/.
"""

import errno

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvport.manifest.identity import PointKind
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import GIB, MIB
from kvport.manifest.tokens import TOKEN_SIZE
from kvport.snapshot.cache.stats import SkipReason
from kvport.snapshot.engine import capture
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.template import render_chat
from kvport.snapshot.state.kv_form import Quantisation
from tests.cache.builder import blob_files, check_account

FORK, PROMPT, STRIDE = PointKind.FORK, PointKind.PROMPT, PointKind.STRIDE
SMALL = {"chunk": 64, "stride": 64, "block": 64}


@pytest.fixture(params=["plain", "drafted"])
def draft(request, model_dir):
    """Where guesses at the next tokens come from: the very model, so that they hold."""
    if request.param == "plain":
        return None
    return DraftSource(model=model_dir("qwen3_5"), tokens=4)


def files_of(r, tokens):
    """Whether every blob on the path of these tokens has its file."""
    nodes = r.match(tokens).nodes
    wanted = {ref.digest.hex() for node in nodes for ref in node.blobs}
    return wanted <= blob_files(r.cache_root)


def whole(r):
    """Nothing is on the disk but what the index knows, to the byte."""
    r.cache.flush()
    ids = r.cache._index.all("SELECT digest FROM file")
    assert blob_files(r.cache_root) == {digest.hex() for (digest,) in ids}
    check_account(r.cache, r.cache_root)


def test_b01_every_boundary_of_a_long_prompt_is_captured(rig, prompt, draft):
    """A hybrid, a prompt of over six boundaries, then a few hundred tokens more."""
    tokens = prompt(794)
    distances = SMALL | {"stride": 128}
    r = rig("qwen3_5", draft=draft, **distances)
    r.complete(tokens)
    expected = {p: {STRIDE} for p in range(128, 794, 128)}
    assert len(expected) == 6
    assert r.points(tokens) == expected | {793: {PROMPT}}
    r.close()
    r = rig("qwen3_5", draft=draft, **distances)
    longer = tokens + prompt(40, seed=1)
    assert r.complete(longer).restored == 793
    counts = r.engine.counts["m"]
    assert (counts.computed_tokens, counts.failed_captures) == (41, 0)


@pytest.mark.parametrize("fault", ["engine", "disk"])
def test_b02_a_run_of_missed_captures_costs_speed_only(
    rig, prompt, monkeypatch, failing_fsync, fault
):
    """One growing conversation; in its middle captures fail for some turns."""
    turns = [prompt(length, seed=5) for length in (200, 260, 320, 400, 460)]
    exact = {"policy": Policy.EXACT, "max_tokens": 8, "full_logprobs": True}
    r = rig("qwen3_5", **SMALL)
    fresh = rig("qwen3_5", home="fresh", **SMALL)

    def turn(tokens):
        answer = r.complete(tokens, **exact)
        r.cache.flush()
        cold = fresh.complete(tokens, read=False, **exact)
        assert np.array_equal(answer.logprobs, cold.logprobs)
        return answer.restored

    def fail(*_, **__):
        raise RuntimeError("[malloc] no memory")

    assert turn(turns[0]) == 0
    if fault == "engine":
        with monkeypatch.context() as patch:
            patch.setattr(capture, "take", fail)
            assert [turn(tokens) for tokens in turns[1:3]] == [192, 192]
        assert r.engine.counts["m"].failed_captures == 2
    else:
        with failing_fsync(errno.EIO):
            assert [turn(tokens) for tokens in turns[1:3]] == [192, 192]
        assert set(r.cache.stats().total.skipped) == {SkipReason.STORAGE}
    assert [turn(tokens) for tokens in turns[3:]] == [192, 384]
    whole(r)


def test_b02_replies_after_missed_captures_are_right(rig, prompt, monkeypatch, draft):
    """The same with what was generated in the conversation, drafted or not."""

    def fail(*_, **__):
        raise RuntimeError("[malloc] no memory")

    r = rig("qwen3_5", draft=draft, **SMALL)
    fresh = rig("qwen3_5", home="fresh", **SMALL)
    conversation, restored = prompt(150), []
    for turn in range(1, 6):
        with monkeypatch.context() as patch:
            if turn in (2, 3):
                patch.setattr(capture, "take", fail)
            answer = r.complete(conversation, max_tokens=8)
        cold = fresh.complete(conversation, read=False, write=False, max_tokens=8)
        assert answer.tokens == cold.tokens
        restored.append(answer.restored)
        conversation += answer.tokens + prompt(20, seed=turn)
    assert r.engine.counts["m"].failed_captures == 2
    assert restored == [0, 158, 158, 158, 242]


def test_b03_boundaries_are_on_disk_when_the_request_ends(rig, prompt, draft):
    """An empty cache, a prompt of over two boundaries, a restart."""
    tokens, distances = prompt(618), {"chunk": 32, "stride": 256, "block": 16}
    r = rig("qwen3_5", draft=draft, **distances)
    r.complete(tokens, max_tokens=1)
    assert set(r.points(tokens)) == {256, 512, 617}
    assert files_of(r, tokens)
    r.close()
    r = rig("qwen3_5", draft=draft, **distances)
    assert r.complete(tokens[:600], max_tokens=1).restored == 512
    assert r.complete(tokens, max_tokens=1).restored == 617


def test_b04_many_blocks_are_stored_like_few(rig, prompt, model_dir):
    """Quantised keys and values; prompts of five, seven and ten blocks."""
    directory = model_dir("llama", kv_bytes_per_token=4096)
    options = {"kv_form": Quantisation(8, 32), **SMALL}
    prompts = [prompt(64 * blocks + 5, seed=blocks) for blocks in (5, 7, 10)]
    r = rig(directory, **options)
    for tokens in prompts:
        r.complete(tokens)
    r.close()
    r = rig(directory, **options)
    for tokens in prompts:
        assert r.complete(tokens).restored == len(tokens) - 1
    assert not r.cache.stats().total.skipped


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EIO, SkipReason.STORAGE), (errno.ENOSPC, SkipReason.DISK_FULL)],
)
def test_b04_a_skipped_store_names_its_cause(
    rig, prompt, failing_fsync, number, reason
):
    """A store that is given up: counted by reason, and in the log with its place."""
    r = rig("llama", **SMALL)
    with failing_fsync(number), capture_logs() as logs:
        r.complete(prompt(300))
        r.cache.flush()
    assert set(r.cache.stats().total.skipped) == {reason}
    broken = [entry for entry in logs if entry["event"] == "cache_chain_broken"]
    assert [(e["start"], e["reason"]) for e in broken] == [(0, reason.value)]


@pytest.mark.parametrize(
    ("arch", "half"),
    [
        ("qwen3_5", BlobClass.KV),
        ("qwen3_5", BlobClass.STATE),
        ("gemma3_text", BlobClass.KV),
        ("gemma3_text", BlobClass.WINDOW),
    ],
)
def test_b05_both_halves_of_a_record_or_neither(rig, prompt, failing_fsync, arch, half):
    """One half of a pair is written, the other fails: nothing of it stays behind."""
    tokens = prompt(300)
    r = rig(arch, **SMALL)
    layout = r.engine.model("m").layout
    # Behind rows lie the ids of their tokens.
    ids = TOKEN_SIZE if half is BlobClass.KV else 0
    sizes = {layout.blob(half, rows).size + ids * rows for rows in range(1, 65)}
    expected = r.complete(tokens, write=False).tokens
    with failing_fsync(errno.EIO, sizes):
        assert r.complete(tokens).tokens == expected
        whole(r)
    assert r.cache.stats().total.skipped[SkipReason.STORAGE] > 0
    r.close()
    r = rig(arch, **SMALL)
    whole(r)
    again = r.complete(tokens)
    assert again.restored < 299
    assert again.tokens == expected
    assert r.complete(tokens).restored == 299
    whole(r)


def test_b06_memory_never_makes_the_granularity_coarser(rig, prompt):
    """Prompts of 1.5k tokens, far below the stride, on a small and a large machine."""
    tokens = prompt(1514)
    found = []
    for memory in (64 * MIB, 256 * GIB):
        r = rig("qwen3_5", home=str(memory), live_bytes=memory)
        r.complete(tokens)
        restored = r.complete(tokens).restored
        found.append(([n.end for n in r.match(tokens).nodes], restored))
        assert not r.cache.stats().total.skipped
    assert found[0] == found[1]
    assert found[0][1] == 1513


def test_b06_granularity_is_settable(rig, prompt):
    """The same prompts with a stride that fits them."""
    tokens = prompt(1514)
    r = rig("qwen3_5", stride=512)
    r.complete(tokens)
    assert set(r.points(tokens)) == {512, 1024, 1513}


@pytest.mark.parametrize("block", [64, 256])
def test_b07_a_set_block_size_is_honoured_and_short_prompts_hit(rig, prompt, block):
    """Block 256 is set, a hybrid loaded, 434 tokens sent twice."""
    tokens = prompt(434)
    r = rig("qwen3_5", block=block, chunk=256, stride=512)
    r.complete(tokens, max_tokens=1)
    assert r.namespace.block_size == block
    ends = [node.end for node in r.match(tokens).nodes]
    assert ends == [*range(block, 433, block), 433]
    assert r.complete(tokens, max_tokens=1).restored == 433


@pytest.mark.parametrize(
    ("arch", "named"),
    [("gemma3_text", "RotatingKVCache"), ("qwen3_5", "Arrays"), ("llama", "of 32")],
)
def test_b07_what_cannot_be_set_is_refused_by_name(rig, prompt, arch, named):
    """Quantised keys and values are set, and the model's cannot be."""
    r = rig(arch, kv_form=Quantisation(8, 32))
    assert named in r.engine.model("m").refusal
    plain = rig(arch, home="b").complete(prompt(40))
    for _ in range(2):
        answer = r.complete(prompt(40))
        assert (answer.restored, answer.tokens) == (0, plain.tokens)


@pytest.mark.parametrize("length", [18, 1100])
def test_b08_boundaries_do_not_depend_on_chunked_prefill(rig, prompt, length):
    """A hybrid of convolutions and attention, prefilled in chunks and in one go."""
    tokens = prompt(length)
    points, answers = [], []
    for chunk in (64, 2048):
        distances = {"chunk": chunk, "stride": 2048, "block": 64}
        r = rig("lfm2", home=str(chunk), **distances)
        answers.append(r.complete(tokens, max_tokens=8).tokens)
        r.close()
        r = rig("lfm2", home=str(chunk), **distances)
        points.append(r.points(tokens))
        again = r.complete(tokens, max_tokens=8)
        assert again.restored == length - 1
        answers.append(again.tokens)
    assert points[0] == points[1] == {length - 1: {PROMPT}}
    assert all(answer == answers[0] for answer in answers)


def test_b09_reasoning_that_is_dropped_later_does_no_harm(rig, model_dir):
    """A thinking model's reply runs over boundaries; its template drops it later."""
    directory = model_dir("qwen3_5", template="thinking")
    r = rig(directory, **SMALL)
    tokenizer = r.engine.model("m").tokenizer
    first = [{"role": "user", "content": "a question " * 20}]
    turn1 = render_chat(tokenizer, first)
    reply = r.complete(turn1.tokens, fork=turn1.fork, max_tokens=200)
    r.cache.flush()
    written = r.cache.stats().total.written[BlobClass.STATE]
    boundary = r.engine.model("m").layout.blob(BlobClass.STATE, 1).size
    length = len(turn1.tokens)
    strides = (length - 1) // SMALL["stride"]
    assert written == (strides + 2) * boundary, "nothing past the fork and the prompt"
    passed = (length + 200) // SMALL["stride"] - strides
    assert r.engine.counts["m"].stripped_points == passed > 0
    second = [
        *first,
        {"role": "assistant", "content": f"<think>\n{reply.text}</think>\nok"},
        {"role": "user", "content": "and now?"},
    ]
    turn2 = render_chat(tokenizer, second)
    assert turn2.tokens[: turn1.fork] == turn1.tokens[: turn1.fork]
    assert turn1.fork < len(turn1.tokens)
    answer = r.complete(turn2.tokens, fork=turn2.fork, max_tokens=8, full_logprobs=True)
    assert answer.restored == turn1.fork
    cold = rig(directory, home="b", **SMALL).complete(
        turn2.tokens, fork=turn2.fork, max_tokens=8, full_logprobs=True
    )
    assert answer.tokens == cold.tokens
    assert np.abs(answer.logprobs - cold.logprobs).max() < 1e-4
    assert r.complete(turn2.tokens).restored == len(turn2.tokens) - 1
    assert r.engine.counts["m"].superseded_replies == 1


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "falcon_h1"])
def test_b10_the_tail_after_the_last_block_is_kept(rig, prompt, arch):
    """A chat whose turns end amid a block: no token of an earlier turn is redone."""
    r = rig(arch)
    conversation = prompt(300)
    conversation += r.complete(conversation, max_tokens=30).tokens
    for turn in range(1, 4):
        if turn == 2:
            r.close()
            r = rig(arch)
        before = len(conversation)
        conversation += prompt(45, seed=turn)
        answer = r.complete(conversation, max_tokens=20)
        assert answer.restored == before
        conversation += answer.tokens
    assert r.engine.counts["m"].failed_captures == 0


def test_b11_the_newest_boundary_before_the_end_of_the_match_is_used(rig, prompt):
    """A window layer, and a match whose last block has no whole window."""
    tokens = prompt(900)
    r = rig("gemma3_text", chunk=256, stride=256)
    r.complete(tokens)
    assert r.complete(tokens + prompt(100, seed=2)).restored == 899
    other = tokens[:850] + prompt(100, seed=4)
    answer = r.complete(other, full_logprobs=True)
    assert 768 <= answer.restored <= 850
    cold = rig("gemma3_text", home="b").complete(other, full_logprobs=True)
    assert answer.tokens == cold.tokens
    assert np.abs(answer.logprobs - cold.logprobs).max() < 1e-4


def test_b12_the_longest_stored_prefix_wins_at_every_turn(rig, prompt, draft):
    """A long conversation that is only ever appended to, with a restart in it."""
    r = rig("qwen3_5", draft=draft, **SMALL)
    conversation, restored = prompt(200), []
    for turn in range(1, 7):
        answer = r.complete(conversation, max_tokens=10)
        restored.append(answer.restored)
        conversation += answer.tokens + prompt(70, seed=turn)
        if turn == 3:
            r.close()
            r = rig("qwen3_5", draft=draft, **SMALL)
    assert restored == [0, *range(210, 210 + 80 * 5, 80)]
    assert (r.engine.counts["m"].drafted_tokens > 0) is (draft is not None)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("harm", ["flip", "unlink"])
def test_b12_a_broken_path_says_where_and_why(rig, prompt, arch, harm):
    """A block in the middle of a stored conversation is damaged or gone."""
    tokens = prompt(600)
    r = rig(arch, **SMALL)
    expected = r.complete(tokens).tokens
    node = next(n for n in r.match(tokens).nodes if n.start == 320)
    ref = node.blob(BlobClass.KV)
    (path,) = r.cache_root.rglob(ref.digest.hex())
    if harm == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with capture_logs() as logs:
        answer = r.complete(tokens)
    assert answer.restored == 320
    assert answer.tokens == expected
    (entry,) = [e for e in logs if e["event"] == "cache_blob_lost"]
    assert (entry["rows"], entry["blob"]) == ([(320, node.end)], "kv")
    assert entry["reason"] == {"flip": "damaged", "unlink": "missing"}[harm]
    assert r.complete(tokens).restored == 599
