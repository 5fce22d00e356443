"""Two servers with nothing shared: what one computed, the other continues."""

import shutil
from datetime import UTC, datetime

import mlx.core as mx
import numpy as np
import pytest

from kvport.api.problems import ProblemError
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.transfer.archive import verify_file
from tests.api.conftest import running, trust

REPLY = {"max_tokens": 32, "logprobs": 5, "ignore_eos": True}


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(1, 300, length).tolist()


def answer(server, name, tokens, **options):
    return server.client.complete(name, tokens=tokens, **REPLY, **options)


def same(left, right):
    return (left.tokens, left.logprobs, left.top_logprobs, left.cached_tokens) == (
        right.tokens, right.logprobs, right.top_logprobs, right.cached_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "falcon_h1"])
def test_imported_prefix_answers_like_the_origin(tmp_path, model_dir, arch):
    file, tokens = tmp_path / "talk.kvport", prompt(700)
    with (
        running(tmp_path / "a", model_dir(arch)) as a,
        running(tmp_path / "b", model_dir(arch)) as b,
    ):
        trust(b, a)
        cold, hot = answer(a, arch, tokens), answer(a, arch, tokens)
        assert (cold.cached_tokens, hot.cached_tokens) == (0, 699)
        a.client.export(arch, file, tokens=tokens)
        imported = b.client.import_(file)
        # A row of its own is stored for the last token, where any row restores.
        assert imported.restored_tokens == (700 if arch == "llama" else 699)
        assert same(answer(b, arch, tokens), hot)
        again = b.client.import_(file)
        assert again.admitted_segments == 0
        assert again.present_segments == imported.admitted_segments


def chunks(chunk):
    return {"tuning": Tuning(chunk=chunk, stride=chunk), "block_size": 128}


@pytest.mark.parametrize("arch", ["falcon_h1", "gemma3_text"])
def test_two_computations_of_one_prefix_stay_apart(tmp_path, model_dir, arch):
    """Other chunks, other bits: A's path restores unmixed on B, beside B's own."""
    tokens, file = prompt(1100), tmp_path / "a.kvport"
    with (
        running(tmp_path / "a", model_dir(arch), **chunks(128)) as a,
        running(tmp_path / "b", model_dir(arch), **chunks(384)) as b,
    ):
        trust(b, a)
        answer(a, arch, tokens)
        answer(b, arch, tokens)
        hot_a, hot_b = answer(a, arch, tokens), answer(b, arch, tokens)
        artifact = a.client.export(arch, file, tokens=tokens).artifact_id
        assert b.client.import_(file).restored_tokens == 1099
        assert same(answer(b, arch, tokens, artifact=artifact), hot_a)
        assert same(answer(b, arch, tokens), hot_b)
        b.client.export(arch, tmp_path / "b.kvport", tokens=tokens)
        for name in ("a", "b"):
            with (tmp_path / f"{name}.kvport").open("rb") as opened:
                found = verify_file(
                    opened, trust=b.node.keyring.load_trust(), now=datetime.now(UTC)
                )
            assert found.manifest.prefix.tokens == 1099
        if arch == "falcon_h1":
            assert hot_a.logprobs != hot_b.logprobs, "the chunk shows in the bits"


def test_other_weights_under_the_same_name_and_path_are_refused(tmp_path, model_dir):
    directory, file = tmp_path / "m" / "same", tmp_path / "m.kvport"
    shutil.copytree(model_dir("llama"), directory)
    tokens = prompt(300)
    with running(tmp_path / "a", directory) as a:
        answer(a, "same", tokens)
        a.client.export("same", file, tokens=tokens)
        path = str(directory / "model.safetensors")
        weights = mx.load(path)  # noqa: TID251 - to change it
        mx.eval(weights)
        mx.save_safetensors(path, {k: v * 1.001 for k, v in weights.items()})
        with running(tmp_path / "b", directory) as b:
            trust(b, a)
            with pytest.raises(ProblemError) as refused:
                b.client.import_(file)
            assert refused.value.problem.code == "binding_mismatch"
            assert refused.value.problem.fields == ("model_files",)
            assert answer(b, "same", tokens).cached_tokens == 0


def test_next_turn_continues_the_reply_on_the_other_server(tmp_path, model_dir):
    directory = model_dir("qwen3_5", template="chatml")
    talk = [{"role": "user", "content": "Count to ten, and slowly, if you please."}]
    file = tmp_path / "talk.kvport"
    with (
        running(tmp_path / "a", directory) as a,
        running(tmp_path / "b", directory) as b,
    ):
        trust(b, a)
        reply = a.client.complete("qwen3_5", messages=talk, max_tokens=40)
        talk.append({"role": "assistant", "content": reply.text})
        exported = a.client.export("qwen3_5", file, messages=talk)
        whole = reply.prompt_tokens + len(reply.tokens)
        assert exported.restorable_tokens == whole
        assert b.client.import_(file).restored_tokens == whole
        talk.append({"role": "user", "content": "And back again?"})
        later = b.client.complete("qwen3_5", messages=talk, max_tokens=5)
        assert later.cached_tokens == whole


def test_part_of_what_is_stored_can_be_exported(tmp_path, model_dir):
    """A prefix that ends where nothing was kept on purpose."""
    tokens = prompt(700)
    for arch, expected in (("llama", 400), ("gemma3_text", 256)):
        file = tmp_path / f"{arch}.kvport"
        with (
            running(tmp_path / f"a-{arch}", model_dir(arch)) as a,
            running(tmp_path / f"b-{arch}", model_dir(arch)) as b,
        ):
            trust(b, a)
            answer(a, arch, tokens)
            a.client.export(arch, file, tokens=tokens[:400])
            assert b.client.import_(file).restored_tokens == expected
            other = tokens[:400] + prompt(50, seed=9)
            assert same(answer(b, arch, other), answer(a, arch, other))
