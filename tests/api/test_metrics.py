"""/metrics and /api/cache/stats are one set of numbers, in two forms."""

import subprocess
import sys
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Running, running
from tests.cache.builder import walk


@pytest.fixture(scope="module")
def busy(tmp_path_factory, models):
    """A server of two models that has stored, restored and missed."""
    with running(tmp_path_factory.mktemp("busy"), *models) as server:
        for model in ("llama", "qwen3_5"):
            for text in ("count me", "count me and more", "another"):
                server.client.complete(model, prompt=text * 9, max_tokens=3)
            server.client.probe(model, prompt="count me")  # waits for what is stored
        yield server


def scraped(server: Running):
    """Values by metric and labels, and the answer."""
    with server.http() as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, "one value of each"
            found[key] = sample.value
    return found, answer


def labels(one, **more):
    return frozenset(
        {
            "namespace": one.get("id", ""),
            "model": one.get("model", ""),
            "scope": one.get("scope", ""),
            **more,
        }.items()
    )


def expected(stats):
    """Every number of the statistics, as a sample."""
    cache = stats["cache"]
    held = {
        ("total_bytes", frozenset()): stats["total_bytes"],
        ("cap_bytes", frozenset()): stats["cap_bytes"],
        ("effective_cap_bytes", frozenset()): stats["effective_cap_bytes"],
        ("available", frozenset()): stats["volume"]["state"] != "absent",
        ("leases", frozenset()): cache["leases"],
        ("index_resets_total", frozenset()): cache["index_resets"],
    }
    for kind, size in cache["beside"].items():
        held["bytes", labels({}, kind=kind)] = size
    for one in cache["namespaces"]:
        held["stored_tokens", labels(one)] = one["tokens"]
        held["stored_segments", labels(one)] = one["segments"]
        for kind, numbers in one["kinds"].items():
            for name, value in numbers.items():
                held[name, labels(one, kind=kind)] = value
    counts = [counted(one) for one in (*cache["namespaces"], cache["gone"])]
    of_cache = held | {key: value for some in counts for key, value in some.items()}
    of_models = {
        (
            f"kvport_{'' if name == 'requests' else 'requests_'}{name}_total",
            frozenset({("model", model)}),
        ): count
        for model, numbers in stats["models"].items()
        for name, count in numbers.items()
    }
    return {
        (f"kvport_cache_{name}", of): value for (name, of), value in of_cache.items()
    } | of_models


def counted(one):
    """What one namespace counts, or those that are gone."""
    samples = {
        ("lookups_total", labels(one, result="hit")): one["hits"],
        ("lookups_total", labels(one, result="miss")): one["misses"],
    }
    for name in ("restored_tokens", "captured_tokens", "failed_prunings", "damaged"):
        samples[f"{name}_total", labels(one)] = one[name]
    for metric, name, label in (
        ("written_bytes", "written", "kind"),
        ("removed_segments", "removed", "reason"),
        ("skipped_segments", "skipped", "reason"),
    ):
        for value, count in one[name].items():
            samples[f"{metric}_total", labels(one, **{label: value})] = count
    for why in ("pruned", "cleared"):
        for kind, lost in one[why].items():
            for name, value in lost.items():
                samples[f"{why}_{name}_total", labels(one, kind=kind)] = value
    return samples


def test_every_number_is_that_of_the_statistics(busy):
    stats = busy.client.stats()
    found, answer = scraped(busy)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert found == expected(stats)
    assert busy.client.stats() == stats, "reading changes nothing"


def test_b22_the_samples_of_two_models_sum_to_the_total(busy):
    found, _ = scraped(busy)
    by_model = defaultdict(int)
    for (name, of), value in found.items():
        if name == "kvport_cache_bytes":
            by_model[dict(of)["model"]] += value
    assert set(by_model) == {"", "llama", "qwen3_5"}
    total = found["kvport_cache_total_bytes", frozenset()]
    assert sum(by_model.values()) == total == walk(busy.home / "cache")
    assert 0 < by_model["llama"] < total
    assert 0 < by_model["qwen3_5"] < total


def test_restored_tokens_are_those_of_the_requests(busy):
    stats = busy.client.stats()
    for one in stats["cache"]["namespaces"]:
        requests = stats["models"][one["model"]]
        assert one["restored_tokens"] == requests["restored_tokens"]
    assert stats["cache"]["total"]["restored_tokens"] > 0
    before = stats["cache"]["total"]
    busy.client.probe("llama", prompt="count me" * 9)
    assert busy.client.stats()["cache"]["total"] == before


def test_only_the_server_loads_prometheus():
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from kvport.api.cli.commands import root\n"
        "CliRunner().invoke(root, ['cache', 'stats', '--help'])\n"
        "CliRunner().invoke(root, ['serve', '--help'])\n"
        "import kvport.api.client\n"
        "assert 'kvport.api.cli.stats' in sys.modules\n"
        "print([n for n in ('prometheus_client', 'litestar') if n in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
