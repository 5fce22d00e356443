"""The selfcheck passes where restore is exact, and fails where it is not."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvport.api.architectures_page import markdown, page, row
from kvport.snapshot.engine import restore
from kvport.snapshot.engine.builder import ARCHITECTURES, KNOWN_ARCHITECTURES
from kvport.snapshot.engine.mlx_private import Batch
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.selfcheck import CASE_NAMES, check_architecture, selfcheck
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.errors import SettingError, UnsupportedModelError
from kvport.snapshot.state.blobs import Assembly
from kvport.snapshot.state.kv_form import Limit, Quantisation

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
# The first architecture of each mixture of caches: more than a third of all.
MIXTURES = {ARCHITECTURES[n].cache: n for n in reversed(KNOWN_ARCHITECTURES)}
# State that is not the origin's shows at once; all steps are for soak.
FEW = 8


def check(directory, work, **options):
    small = {"tokens": 172, "chunk": 64, "block": 64, "steps": FEW}
    return selfcheck("m", directory, work=work, **small | options)


def test_a_third_of_the_architectures_has_every_mixture_of_caches():
    assert len(MIXTURES) >= len(ARCHITECTURES) / 3


@pytest.mark.parametrize("name", sorted(MIXTURES.values()))
def test_every_restore_point_is_exact(name):
    found = check_architecture(name, steps=FEW)
    assert found.passed
    assert markdown(row(found)) in PAGE.read_text().splitlines()
    cases = {(case.case, case.policy): case for case in found.report.cases}
    assert set(cases) == {(name, policy) for name in CASE_NAMES for policy in Policy}
    for (_, policy), case in cases.items():
        assert case.max_diff_to_hot == 0
        assert case.max_diff_to_cold == (0 if policy is Policy.EXACT else None)
    nearest = {n: c.restored_tokens for (n, p), c in cases.items() if p == "nearest"}
    assert nearest == nearest | {"stride": 128, "prompt": 171, "reply": 172 + 37}


def test_the_page_lists_every_architecture():
    names = [
        line.split("|")[1].strip()
        for line in PAGE.read_text().splitlines()[-len(KNOWN_ARCHITECTURES) :]
    ]
    assert names == list(KNOWN_ARCHITECTURES)
    assert PAGE.read_text().startswith(page([]))


@pytest.mark.soak
def test_all_architectures_are_exact():
    found = [check_architecture(name) for name in KNOWN_ARCHITECTURES]
    assert [report.name for report in found if not report.passed] == []
    assert [report.name for report in found if report.refused] == []
    assert len(found) >= 30
    assert PAGE.read_text() == page(found)


def test_batched_requests_join_while_others_decode(model_dir, tmp_path, monkeypatch):
    together = set()
    step = Batch.step

    def watched(self):
        found = step(self)
        together.add(len(found.tokens))
        return found

    monkeypatch.setattr(Batch, "step", watched)
    assert check(model_dir("llama"), tmp_path).passed
    assert max(together) > 1


def test_drafted_replies_are_stepped_back(monkeypatch):
    guesses = Counter()
    step = Solo.step

    def watched(self):
        found = step(self)
        guesses.update(drafted=found.drafted, accepted=found.accepted)
        return found

    monkeypatch.setattr(Solo, "step", watched)
    assert check_architecture("qwen3_5", steps=FEW).passed
    assert guesses["drafted"] > 37 > guesses["accepted"]


@pytest.mark.parametrize("quantisation", [Quantisation(4, 32), Quantisation(8, 64)])
def test_quantised_state_is_exact(model_dir, tmp_path, quantisation):
    directory = model_dir("llama", kv_bytes_per_token=4096)
    report = check(directory, tmp_path, kv_form=quantisation)
    assert report.alone
    assert report.passed


@pytest.mark.parametrize("rows", [48, 100, 1000])
def test_limited_state_is_exact(model_dir, tmp_path, rows):
    """Fewer rows than a chunk, fewer than two, more than the prompt has."""
    report = check(model_dir("llama"), tmp_path, kv_form=Limit(rows))
    assert report.alone
    assert report.passed


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "mamba2"])
def test_one_wrong_value_fails_every_case(model_dir, tmp_path, monkeypatch, arch):
    class Wrong(Assembly):
        def caches(self):
            for hosts in self._host:
                values = hosts[0].view(np.float32)
                values[..., -1:, :] += 1e-3
            return super().caches()

    monkeypatch.setattr(restore, "Assembly", Wrong)
    report = check(model_dir(arch), tmp_path)
    assert [case.restored_tokens for case in report.cases] == [
        case.expected_tokens for case in report.cases
    ]
    assert all(case.max_diff_to_hot > 0 for case in report.cases)
    assert not any(case.passed for case in report.cases)
    assert report.max_diff_to_cold > 0
    assert not report.passed


def test_one_flipped_bit_fails(model_dir, tmp_path, monkeypatch):
    class Flipped(Assembly):
        def caches(self):
            if self._position == 171:  # the prompt point
                self._host[0][0].reshape(-1)[-1] ^= 1 << 20
            return super().caches()

    monkeypatch.setattr(restore, "Assembly", Flipped)
    report = check(model_dir("llama"), tmp_path)
    failed = {(case.case, case.policy) for case in report.cases if not case.passed}
    assert failed == {("prompt", Policy.NEAREST)}
    assert report.max_diff_to_hot > 0


def test_values_that_are_no_numbers_fail(model_dir, tmp_path, monkeypatch):
    class Undefined(Assembly):
        def caches(self):
            self._host[0][0].view(np.float32)[...] = np.nan
            return super().caches()

    monkeypatch.setattr(restore, "Assembly", Undefined)
    report = check(model_dir("llama"), tmp_path)
    assert np.isfinite(report.max_diff_to_hot)
    assert not any(case.passed for case in report.cases)


def test_restoring_nothing_fails(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "_ATTEMPTS", 0)
    report = check(model_dir("llama"), tmp_path)
    assert (report.restored_tokens, report.max_diff_to_cold) == (0, 0)
    assert not report.passed


def test_a_prompt_without_a_stride_point_is_refused(model_dir, tmp_path):
    with pytest.raises(SettingError):
        check(model_dir("llama"), tmp_path, tokens=67)
    assert check(model_dir("llama"), tmp_path, tokens=68).passed


def test_an_uncached_model_is_refused(model_dir, tmp_path):
    with pytest.raises(UnsupportedModelError):
        check(model_dir("mamba2"), tmp_path, kv_form=Quantisation(8, 32))
