"""The selfcheck passes where restore is exact, and fails where it is not."""

import numpy as np
import pytest

from kvport.snapshot.engine import restore
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.selfcheck import selfcheck
from kvport.snapshot.errors import SettingError, UnsupportedModelError
from kvport.snapshot.state.blobs import Assembly
from kvport.snapshot.state.probe import Quantisation

ARCHITECTURES = [
    "llama", "qwen3", "gemma3_text", "qwen3_5", "qwen3_next", "mamba2", "falcon_h1",
    "lfm2", "deepseek_v3", "llama4",
]  # fmt: skip


def check(
    directory, work, policy=Policy.NEAREST, *, tokens=600, chunk=256, quantisation=None
):
    return selfcheck(
        "m",
        directory,
        work=work,
        tokens=tokens,
        policy=policy,
        chunk=chunk,
        quantisation=quantisation,
    )


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_restored_state_is_exact(model_dir, tmp_path, arch, policy):
    report = check(model_dir(arch), tmp_path, policy)
    assert report.max_diff_to_hot == 0
    assert report.restored_tokens == (599 if policy is Policy.NEAREST else 512)
    if policy is Policy.EXACT:
        assert report.max_diff_to_cold == 0
    assert report.passed


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("quantisation", [Quantisation(4, 32), Quantisation(8, 64)])
def test_quantised_state_is_exact(model_dir, tmp_path, quantisation, policy):
    directory = model_dir("llama", kv_bytes_per_token=4096)
    report = check(directory, tmp_path, policy, quantisation=quantisation)
    assert report.max_diff_to_hot == 0
    assert report.passed


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "mamba2"])
def test_one_wrong_value_fails(model_dir, tmp_path, monkeypatch, arch):
    class Wrong(Assembly):
        def caches(self):
            for hosts in self._host:
                values = hosts[0].view(np.float32)
                values[..., -1:, :] += 1e-3
            return super().caches()

    monkeypatch.setattr(restore, "Assembly", Wrong)
    report = check(model_dir(arch), tmp_path)
    assert report.restored_tokens == 599
    assert report.max_diff_to_hot > 0
    assert not report.passed


def test_restoring_nothing_fails(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "_ATTEMPTS", 0)
    report = check(model_dir("llama"), tmp_path)
    assert (report.restored_tokens, report.max_diff_to_cold) == (0, 0)
    assert not report.passed


def test_a_prompt_too_short_for_the_policy_is_refused(model_dir, tmp_path):
    with pytest.raises(SettingError):
        check(model_dir("llama"), tmp_path, Policy.EXACT, tokens=256)


def test_an_uncached_model_is_refused(model_dir, tmp_path):
    with pytest.raises(UnsupportedModelError):
        check(model_dir("mamba2"), tmp_path, quantisation=Quantisation(8, 32))
