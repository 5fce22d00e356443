"""kill -9 in the middle of storing, evicting and removing; then start again."""

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvport.manifest.limits import GIB, MIB
from tests.cache.builder import (
    ALL,
    blob_files,
    check_account,
    find,
    open_cache,
    read_all,
    space,
)
from tests.cache.storing_child import CUTS, tokens_of


def killed_in_the_middle(root: Path, seed: int, cap: int) -> list[list[str]]:
    """Lines of a child that was killed after a random number of them."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cache.storing_child", root, str(seed), str(cap)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as child:  # fmt: skip
        some = random.Random(seed).randrange(1, 80)
        text = [*itertools.islice(child.stdout, some)]
        child.kill()
        text += child.stdout
        assert child.wait() == -9
    # The log goes to the same stream, and the last line may be cut.
    lines = [line.split() for line in text if line.endswith("\n")]
    return [line for line in lines if line[0] in ("append", "durable")]


@pytest.mark.parametrize("cap", [GIB, 6 * MIB])
def test_a_killed_process_leaves_a_cache_that_is_whole(root, cap):
    total = 0
    for seed in range(5):
        lines = killed_in_the_middle(root, seed, cap)
        with open_cache(root, cap) as cache:
            ns = space(cache, ALL)
            stats = cache.stats()
            assert stats.index_resets == stats.total.damaged == 0
            # Nothing that a crash leaves behind costs a node.
            assert not stats.total.removed
            assert not list((root / "staging").iterdir())
            [numbers] = stats.namespaces
            assert len(blob_files(root)) == numbers.files
            check_account(cache, root)
            for number in {int(line[1]) for line in lines}:
                match = find(cache, ns, tokens_of(seed, number))
                if match is not None:
                    total += len(read_all(cache, ns, match.nodes))
                if number and cap == GIB and ["durable", str(number)] in lines:
                    assert match.position == CUTS[-1]
            assert cache.stats().total.damaged == 0
    assert total > 100
