"""Drafting changes the speed of a reply, and nothing else."""

import attrs
import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import ConcatenateKVCache
from mlx_lm.utils import load_model

from kvport.snapshot.engine import models
from kvport.snapshot.engine.builder import KNOWN_ARCHITECTURES
from kvport.snapshot.engine.drafting.draft_model import DraftModel, DraftModelDrafter
from kvport.snapshot.engine.drafting.drafter import Drafting
from kvport.snapshot.engine.drafting.ngram import NgramDrafter
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.requests import Sampling
from kvport.snapshot.engine.sampling import make_sampler
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.engine.steps import NewSequence
from kvport.snapshot.errors import SettingError, UnsupportedModelError
from kvport.snapshot.state.probe import Quantisation, make_caches, probe
from tests.engine.drafted import (
    BLOCK,
    PROMPT,
    RIGHT,
    Case,
    Oracle,
    assert_close,
    insert,
    reply,
)

# A model of few layers is quick; these have all their kinds of layers.
LAYERS = {
    "llama": 2, "gemma3_text": 4, "qwen3_5": 4, "mamba2": 2, "falcon_h1": 2,
    "baichuan_m1": 2, "llama4": 4, "quantised": 2, "deepseek_v3": 2,
}  # fmt: skip
EVERY = list(LAYERS)
KINDS = ["llama", "gemma3_text", "qwen3_5"]
"""Full layers only, windows, whole layers."""


@pytest.fixture(scope="module")
def cases(model_dir):
    made = {}

    def make(arch, seed=0):
        if (arch, seed) not in made:
            quantisation, options = None, {"layers": LAYERS[arch], "seed": seed}
            if arch == "quantised":
                quantisation = Quantisation(8, 32)
                options["kv_bytes_per_token"] = 2048
            directory = model_dir("llama" if arch == "quantised" else arch, **options)
            module = load_model(directory)[0]
            layout = probe(module, quantisation).layout
            made[arch, seed] = Case(module, layout, quantisation)
        return made[arch, seed]

    return make


@pytest.fixture(scope="module")
def plain(cases):
    """Undrafted replies, computed once."""
    said = {}

    def say(arch):
        if arch not in said:
            said[arch] = reply(cases(arch))
        return said[arch]

    return say


def assert_same(ours, theirs):
    assert ours.tokens == theirs.tokens
    assert ours.finish == theirs.finish
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert a.shape == b.shape
        assert mx.abs(a - b).max().item() < 1e-3
    assert_close(ours, theirs)
    assert ours.verifies + ours.accepted == len(ours.tokens)
    assert ours.accepted <= ours.drafted


@pytest.mark.parametrize("arch", EVERY)
def test_prompt_lookup_says_what_is_said_without(cases, plain, arch):
    assert_same(reply(cases(arch), NgramDrafter), plain(arch))


@pytest.mark.parametrize(
    ("arch", "right"),
    [
        pytest.param(arch, right, marks=pytest.mark.soak if often else ())
        for arch in EVERY
        for right, often in [
            ("never", False),
            ("every second", False),
            ("most", arch not in KINDS),
            ("always", arch not in KINDS),
        ]
    ],
)
def test_guesses_of_any_quality_leave_no_trace(cases, plain, arch, right):
    expected = plain(arch)
    ours = reply(cases(arch), Oracle(expected.text, RIGHT[right]))
    assert_same(ours, expected)
    match right:
        case "never":
            assert (ours.accepted, ours.verifies) == (0, 200)
            assert ours.drafted > 200
        case "always":
            assert ours.accepted == ours.drafted
            # Block ends cut some verifies of nine tokens short.
            assert ours.verifies <= 200 / 9 + 200 / BLOCK + 2
        case _:
            assert 0 < ours.accepted < ours.drafted


@pytest.mark.soak
@pytest.mark.parametrize("right", ["every second", "most"])
@pytest.mark.parametrize("arch", KNOWN_ARCHITECTURES)
def test_rejected_guesses_leave_no_trace_in_any_architecture(model_dir, arch, right):
    module = load_model(model_dir(arch))[0]
    case = Case(module, probe(module).layout)
    expected = reply(case, count=100)
    ours = reply(case, Oracle(expected.text, RIGHT[right]), count=100)
    assert 0 < ours.accepted < ours.drafted
    assert_same(ours, expected)


@pytest.mark.parametrize(
    "arch", ["gemma3_text", pytest.param("llama_swa", marks=pytest.mark.soak)]
)
def test_trap_8_windows_survive_rejections_where_mlx_lm_goes_wrong(model_dir, arch):
    module = load_model(model_dir(arch, layers=4))[0]
    draft = load_model(model_dir(arch, layers=4, seed=1))[0]
    case = Case(module, probe(module).layout)
    expected = reply(case, count=80)
    drafter = DraftModelDrafter(draft, make_caches(draft, None))
    ours = reply(case, lane=case.lane(lambda: drafter, draft_tokens=3), count=80)
    assert ours.accepted < ours.drafted / 2
    assert_same(ours, expected)
    theirs = speculative_generate_step(
        mx.array(PROMPT), module, draft, num_draft_tokens=3, max_tokens=80
    )
    assert [int(token) for token, _, _ in theirs] != expected.tokens


@pytest.fixture(scope="module")
def loaded(model_dir, tmp_path_factory):
    files = FileDigests(tmp_path_factory.mktemp("digests") / "digests.json")

    def load(arch, seed=0):
        directory = model_dir(arch, layers=LAYERS[arch], seed=seed)
        return models.load_model(f"{arch}-{seed}", directory, files)

    return load


@pytest.mark.parametrize(
    ("arch", "draft"),
    [
        ("llama", "mamba2"),
        ("gemma3_text", "deepseek_v3"),
        ("qwen3_5", "llama"),
        ("falcon_h1", "baichuan_m1"),
        pytest.param("mamba2", "gemma3_text", marks=pytest.mark.soak),
        pytest.param("baichuan_m1", "llama4", marks=pytest.mark.soak),
        pytest.param("llama4", "qwen3_5", marks=pytest.mark.soak),
        pytest.param("quantised", "falcon_h1", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", "mamba2", marks=pytest.mark.soak),
    ],
)
def test_a_draft_model_of_other_weights_is_harmless(cases, plain, loaded, arch, draft):
    target = loaded("llama" if arch == "quantised" else arch)
    drafter = DraftModel(loaded(draft, seed=1), target)
    lane = cases(arch).lane(drafter, draft_tokens=2)
    ours = reply(cases(arch), lane=lane)
    assert_same(ours, plain(arch))
    assert ours.drafted > 0
    assert ours.accepted < ours.drafted


@pytest.mark.parametrize("arch", [a for a in EVERY if a != "quantised"])
def test_a_model_that_drafts_for_itself_is_always_right(cases, plain, loaded, arch):
    ours = reply(cases(arch), DraftModel(loaded(arch), target=loaded(arch)))
    assert_same(ours, plain(arch))
    assert ours.accepted == ours.drafted > 150


@pytest.mark.parametrize(
    "arch", ["llama", "gemma3_text", "mamba2", "llama4", "baichuan_m1"]
)
def test_a_draft_model_forgets_what_was_not_accepted(cases, arch):
    case, text = cases(arch), [*PROMPT]

    def fresh():
        return DraftModelDrafter(case.module, make_caches(case.module, None))

    drafter = fresh()
    for turn in range(12):
        proposed = drafter.propose(text, 5)
        assert proposed == fresh().propose(text, 5)
        text += [*proposed[: turn % 4], 7 + turn]


def test_a_draft_model_reads_the_last_1024_tokens_of_a_prompt(cases):
    case, evaluated = cases("llama"), []

    def module(tokens, cache):
        evaluated.append(tokens.size)
        return case.module(tokens, cache=cache)

    drafter = DraftModelDrafter(module, make_caches(case.module, None))
    text = PROMPT * 80
    first = drafter.propose(text, 3)
    assert sum(evaluated) == 1024 + 2
    assert max(evaluated) == 512
    evaluated.clear()
    drafter.propose([*text, *first, 9], 3)
    assert evaluated == [4, 1, 1]


def test_a_draft_model_of_another_vocabulary_is_refused(loaded):
    target = loaded("llama")
    other = attrs.evolve(loaded("llama", seed=1), vocabulary=target.vocabulary + 1)
    with pytest.raises(SettingError, match=f"{target.vocabulary + 1} token ids, not"):
        DraftModel(other, target)


def test_a_draft_model_of_unknown_state_is_refused(loaded):
    other = attrs.evolve(loaded("llama", seed=1), refusal="cache 0 (Odd) is odd")
    with pytest.raises(SettingError, match="is odd"):
        DraftModel(other, loaded("llama"))


def test_a_model_that_cannot_be_stepped_back_is_not_drafted(cases):
    module = cases("llama").module
    lane = Solo(module, 64, lambda: [ConcatenateKVCache()] * 2, Drafting(NgramDrafter))
    with pytest.raises(UnsupportedModelError, match="cannot be stepped back"):
        insert(lane)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("right", ["most", "always"])
def test_a_seed_draws_the_same_reply(cases, arch, right):
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11)
    expected = reply(cases(arch), count=80, sampler=make_sampler(sampling))
    drafter = Oracle(expected.text, RIGHT[right])
    ours = reply(cases(arch), drafter, count=80, sampler=make_sampler(sampling))
    assert ours.accepted > 40
    assert_same(ours, expected)


@pytest.mark.parametrize("arch", EVERY)
def test_a_stop_token_ends_the_reply_among_accepted_guesses(cases, plain, arch):
    text = plain(arch).text
    drafter = Oracle(text, RIGHT["always"])
    ends = reply(cases(arch), drafter, count=100).ends
    place = next(
        i
        for i in range(len(PROMPT) + 12, len(text))
        if text[i] not in text[len(PROMPT) : i] and i + 1 not in ends
    )
    request = {"count": 200, "stops": [text[place]]}
    expected = reply(cases(arch), **request)
    ours = reply(cases(arch), drafter, **request)
    assert (ours.finish, len(ours.text)) == ("stop", place + 1)
    assert_same(ours, expected)


@pytest.mark.parametrize("arch", EVERY)
def test_a_reply_can_end_at_any_token_of_a_step(cases, plain, arch):
    """A stop text, or a cancellation, in the middle of what was accepted."""
    case, text = cases(arch), plain(arch).text
    expected = reply(case, count=20, every=1)
    # Accepted whole; in part; after a part of an earlier step that is ahead.
    for right, cut in [("always", 73), ("always", 84), ("most", 75), ("most", 80)]:
        lane = case.lane(Oracle(text, RIGHT[right]))
        uid, count = insert(lane, count=20), len(PROMPT)
        while count < cut:
            count += len(lane.step().tokens)
        assert count > cut
        live = lane.live(uid, cut)
        assert live.held == cut
        ours = attrs.evolve(expected, states={cut: case.canonical(live)})
        assert_close(ours, attrs.evolve(expected, states={cut: expected.states[cut]}))
        assert lane.step().tokens == ()


@pytest.mark.parametrize("arch", KINDS)
def test_caches_that_were_looked_at_go_on_as_before(cases, plain, arch):
    case, expected = cases(arch), plain(arch)
    lane = case.lane(Oracle(expected.text, RIGHT["most"]))
    uid, tokens = insert(lane), []
    while len(tokens) < 150:
        tokens += [token.token for token in lane.step().tokens]
        if tokens:
            assert lane.live(uid).held == len(PROMPT) + len(tokens)
    assert tokens == expected.tokens[: len(tokens)]


def test_caches_cannot_go_back_before_the_last_step(cases, plain):
    lane = cases("llama").lane(Oracle(plain("llama").text, RIGHT["always"]))
    uid, tokens = insert(lane), ()
    while len(tokens) < 3:
        tokens = lane.step().tokens
    held = lane.live(uid).held
    for wrong in (held - len(tokens), held + 1):
        with pytest.raises(RuntimeError):
            lane.live(uid, wrong)
    assert lane.live(uid, held - len(tokens) + 1).held == held - len(tokens) + 1


@pytest.mark.parametrize("arch", KINDS)
def test_a_removed_sequence_leaves_the_next_alone(cases, plain, arch):
    case, expected = cases(arch), plain(arch)
    lane = case.lane(Oracle(expected.text, RIGHT["most"]))
    first = insert(lane)
    waiting = insert(lane)
    tokens = []
    while len(tokens) < 20:
        tokens += lane.step().tokens
    assert lane.live(waiting) is None
    lane.remove(waiting)
    lane.remove(first)
    assert lane.live(first) is None
    assert reply(case, lane=lane, count=200).tokens == expected.tokens


@pytest.mark.parametrize("arch", KINDS)
def test_drafting_goes_on_from_restored_caches(cases, plain, arch):
    case, expected = cases(arch), plain(arch)
    caches = make_caches(case.module, None)
    mx.eval(case.module(mx.array([PROMPT[:64]]), cache=caches))
    lane = case.lane(NgramDrafter)
    lane.insert(
        NewSequence(
            segments=[PROMPT[64:-1], PROMPT[-1:]],
            prefix=PROMPT[:64],
            caches=caches,
            max_tokens=60,
        )
    )
    tokens = []
    while len(tokens) < 60:
        tokens += [token.token for token in lane.step().tokens]
    assert tokens == expected.tokens[:60]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_reply_never_outgrows_its_length(cases, plain, count):
    drafter = Oracle(plain("llama").text, RIGHT["always"])
    ours = reply(cases("llama"), drafter, count=count)
    assert ours.tokens == plain("llama").tokens[:count]
    assert ours.finish == "length"


@pytest.mark.parametrize(
    # With these weights gemma3_text and mamba2 do differ, on a CPU.
    ("arch", "seed"),
    [("llama", 0), ("gemma3_text", 1), ("mamba2", 2)],
)
def test_in_bfloat16_the_first_difference_is_a_tie(model_dir, arch, seed):
    module = load_model(model_dir(arch, layers=LAYERS[arch], seed=seed))[0]
    module.set_dtype(mx.bfloat16)
    case = Case(module, probe(module).layout)
    expected = reply(case)
    ours = reply(case, Oracle(expected.text, RIGHT["most"]))
    pairs = zip(expected.tokens, ours.tokens, strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return
    row = expected.logprobs[first].astype(mx.float32)
    gap = row[expected.tokens[first]] - row[ours.tokens[first]]
    assert gap.item() <= rounding(case, expected.text[: len(PROMPT) + first])


def rounding(case, text):
    """Largest difference of log-probabilities: one by one, and nine at once."""
    found = []
    for width in (1, 9):
        caches = make_caches(case.module, None)
        case.module(mx.array([text[: len(PROMPT)]]), cache=caches)
        logits = [
            case.module(mx.array([text[i : i + width]]), cache=caches)[0]
            for i in range(len(PROMPT), len(text), width)
        ]
        found.append(mx.concatenate(logits).astype(mx.float32))
    return mx.abs(found[0] - found[1]).max().item()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drafter", ["prompt lookup", "draft model"])
@pytest.mark.parametrize("arch", KINDS)
def test_2000_tokens_on_a_repetitive_prompt(model_dir, arch, drafter):
    module = load_model(model_dir(arch))[0]
    # Random weights hardly ever repeat themselves. Louder embeddings do: what comes
    # next depends more on the last token, still on all others.
    inner = getattr(module, "language_model", module).model.embed_tokens
    inner.weight = inner.weight * 4
    case = Case(module, probe(module).layout)
    expected = reply(case, count=2000)

    def own():
        return DraftModelDrafter(module, make_caches(module, None))

    ours = reply(case, NgramDrafter if drafter == "prompt lookup" else own, count=2000)
    assert_same(ours, expected)
    assert ours.accepted / ours.verifies > 1
